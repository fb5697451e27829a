"""Weights between machines: sends published versions over links to consumers on other nodes."""
