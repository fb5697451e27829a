"""Placement: nodes, devices, workers and ranks; where processes start, and what is in quarantine."""
