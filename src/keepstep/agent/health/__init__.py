"""Whether the node's devices are well: what NVML shows of them, what follows from it, and what the agent does then."""
