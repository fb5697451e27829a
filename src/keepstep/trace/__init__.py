"""What a run leaves in its folder, and what can be seen in it: timelines, traces, pictures, reports."""
