"""The files of a run, and their views: timelines, traces, pictures, reports."""
