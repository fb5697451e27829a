"""Publishers on several nodes: connects their devices over links."""
