"""A job on several nodes: each an agent, and one of them, or somebody else, the controller."""
