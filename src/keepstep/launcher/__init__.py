"""One job on one node: a controller and an agent in the launcher's process, talking in messages."""
