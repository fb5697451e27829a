"""A run's folder: the files written while the job runs, and their readers, which work while the files grow."""
