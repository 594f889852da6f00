"""A run: its folder, its driver, what it logs, and how it resumes."""
