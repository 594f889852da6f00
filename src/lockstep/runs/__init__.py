"""A run: how it begins, trains, evaluates, saves, finishes and resumes, its folder, what it logs."""
