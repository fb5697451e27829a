"""The screen of `keepstep top`."""
