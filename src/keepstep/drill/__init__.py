"""Injects faults into the processes of a real job, and reports whether the weights are identical."""
