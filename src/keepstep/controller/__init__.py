"""One per job: collects reports, decides, gives orders. Never touches a tensor."""
