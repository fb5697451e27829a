"""Runs a job on several nodes: an agent on each, and the controller on one of them or on another machine."""
