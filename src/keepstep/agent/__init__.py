"""The agent of a node: starts workers, detects when they die or hang, and performs the controller's orders."""
