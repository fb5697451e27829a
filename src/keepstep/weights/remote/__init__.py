"""Weights between machines: what a device offers on its own node reaches the consumers on other nodes, over links."""
