"""The start-up of simulated scripts."""
