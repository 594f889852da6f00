"""The fields of a recipe, one file for each subject. Each file checks what depends on its
fields alone."""
