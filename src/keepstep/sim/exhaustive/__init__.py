"""Every interleaving of a small job around one failure, where a seed would only sample one."""
