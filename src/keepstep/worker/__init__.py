"""Code that runs inside the user's training process."""
