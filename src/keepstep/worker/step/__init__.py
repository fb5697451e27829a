"""One training step: its phases, its stop points, the gradient barrier."""
