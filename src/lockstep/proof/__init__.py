"""The proof next to a deployed model: probe photos, the expected pixels and answers, and a program
that compares.

    photos/      probe photos, which `photos.py` draws
    proof.json   what the model decodes, sees and answers, and what it would answer after a mistake
    check.py     compares with it, where the model runs
"""
