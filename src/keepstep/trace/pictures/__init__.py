"""Pictures, traces and reports of a run, for people and for the viewers that they have."""
