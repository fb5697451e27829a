"""Injects real faults into a real job, and reports whether the weights are identical."""
