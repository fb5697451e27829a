"""Memory shared by an agent and its workers: it outlives a worker, and shows where the worker died."""
