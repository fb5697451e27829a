"""What simulated scripts do in their start-up, besides building, with the help of the controller's real machines."""
