"""The control network of a simulated cluster, and the relays at the controller's end of it."""
