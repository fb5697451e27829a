"""Relays: processes beside the controller that hold the connections to its agents and bundle what these send."""
