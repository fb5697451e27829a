"""Relays: processes that hold a controller's connections to its agents, and what they write to each other."""
