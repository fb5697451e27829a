"""Tensors on the CPU, by torch's gloo backend."""
