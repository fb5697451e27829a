"""Explores every interleaving of a small job around one failure, of which a seed only samples one."""
