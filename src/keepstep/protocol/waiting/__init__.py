"""What ranks wait in, and how a hang without a culprit is explained."""
