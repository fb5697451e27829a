"""The process groups of a simulated job besides the world's, and which of them stay in a recovery."""
