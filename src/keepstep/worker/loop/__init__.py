"""The loops of a training script: over steps, over batches and over epochs."""
