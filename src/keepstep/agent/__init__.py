"""One per node: starts workers, sees them die or stall, carries out the controller's orders."""
