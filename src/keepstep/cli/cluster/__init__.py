"""The commands of a job on several nodes."""
