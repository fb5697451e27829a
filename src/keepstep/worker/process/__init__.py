"""Creation and end of worker processes."""
