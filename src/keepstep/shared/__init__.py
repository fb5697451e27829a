"""What an agent and its workers have open together: it outlives a worker, and shows where that died."""
