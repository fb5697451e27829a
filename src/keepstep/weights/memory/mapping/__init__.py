"""Weights whose names, fusions and dtypes differ from those of the other side."""
