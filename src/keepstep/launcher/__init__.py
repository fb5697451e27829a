"""Runs a job on one node. The controller and the agent exchange messages inside the launcher's process."""
