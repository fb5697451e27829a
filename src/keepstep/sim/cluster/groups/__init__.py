"""The process groups of a simulated job beside the world's, and how those that stay do so."""
