"""What ranks wait in, and how a hang that is nobody's fault is explained."""
