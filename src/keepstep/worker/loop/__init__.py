"""What a training loop is handed: steps, and the batches of a loader."""
