"""Relays: processes that hold a controller's connections to its agents, and their protocol with the controller."""
