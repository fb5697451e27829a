"""How messages travel: frames on a Unix socket between worker and agent, a pair of queues inside one process."""
