"""Health of the node's devices: conditions that NVML reports, the resulting action, and the agent's reaction."""
