"""A run's folder: what is written there while the job runs, and how it is read, also while it still grows."""
