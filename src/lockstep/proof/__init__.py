"""The proof next to a model that is deployed: probe photos, what is to be seen and answered for
them, and a program that compares.

    photos/      probe photos, which `photos.py` draws
    proof.json   what the model decodes, sees and answers, and what it would answer after a mistake
    check.py     compares with it, where the model runs
"""
