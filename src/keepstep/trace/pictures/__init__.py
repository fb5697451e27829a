"""Pictures, traces and reports of a run."""
