"""A run: how it begins, trains, evaluates, saves and resumes, its folder, what it logs."""
