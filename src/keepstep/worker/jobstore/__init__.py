"""Torch's default store, shared by all ranks of a job."""
