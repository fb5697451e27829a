"""Buffers of fixed size, and what is copied between them and tensors."""
