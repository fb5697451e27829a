"""Relays: processes next to the controller that hold the connections to its agents and bundle their packets."""
