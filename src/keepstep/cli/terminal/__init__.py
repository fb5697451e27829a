"""What `keepstep top` shows."""
