"""A publishing device in an update: its connections, its stages, and the coordinator on rank 0."""
