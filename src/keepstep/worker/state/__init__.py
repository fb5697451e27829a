"""What has to be the same after a recovery as before: parameters, optimizer state, buffers, host state, RNG."""
