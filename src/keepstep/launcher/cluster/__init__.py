"""A job on several nodes: each an agent, and one of them, or another machine, the controller."""
