"""Publishers on several nodes: the devices of one node reach those of the others over links."""
