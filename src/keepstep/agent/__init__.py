"""One per node: starts workers, detects that they died or hang, and performs the controller's orders."""
