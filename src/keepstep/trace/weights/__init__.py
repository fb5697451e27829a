"""What is known of the weights that a job publishes."""
