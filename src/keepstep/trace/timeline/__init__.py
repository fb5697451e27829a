"""What happened in a run: its journal lived through once more, and what its ranks did meanwhile."""
