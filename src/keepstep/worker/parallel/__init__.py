"""Adapters: what each form of parallelism needs around a step."""
