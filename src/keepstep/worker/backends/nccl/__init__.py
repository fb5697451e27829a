"""Tensors on GPUs of NVIDIA's, by torch's NCCL backend. Written from torch's sources; it has run on no GPU yet."""
