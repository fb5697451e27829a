"""The state of the weights that a job publishes."""
