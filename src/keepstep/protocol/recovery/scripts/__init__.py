"""What scripts ask the controller for: what happens once in a job, and what the ranks exchanged as they started."""
