"""The parts of a simulated cluster: time, network, ranks, nodes and the controller, each a thin layer."""
