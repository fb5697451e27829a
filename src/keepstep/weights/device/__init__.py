"""One device in an update: who reports to it, its stages, and the coordinator on rank 0."""
