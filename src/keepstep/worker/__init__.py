"""What runs inside the user's training process."""
