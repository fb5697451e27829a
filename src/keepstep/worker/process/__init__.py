"""How a worker's process comes into being."""
