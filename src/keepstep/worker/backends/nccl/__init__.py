"""Tensors on NVIDIA GPUs, with torch's NCCL backend. Written from torch's sources; never run on a GPU."""
