"""The state that a recovery restores: parameters, optimizer state, buffers, host state, RNG."""
