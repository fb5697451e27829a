"""One job on one node: a controller and an agent in the launcher's process, which exchange messages."""
