"""The start-up of simulated scripts, with the controller's real machines."""
