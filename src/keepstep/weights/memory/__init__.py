"""Buffers of fixed size, and copies between them and tensors."""
