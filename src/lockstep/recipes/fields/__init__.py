"""The fields of a recipe, one file for each subject. Each file checks what its fields alone
decide."""
