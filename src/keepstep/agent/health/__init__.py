"""Health of the node's devices: the conditions that NVML reports, their actions, and the agent's reaction."""
