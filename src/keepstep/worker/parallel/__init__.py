"""What each way to parallelise a model needs around a step."""
