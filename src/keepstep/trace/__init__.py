"""The files of a run, and their views: timelines, traces, reports."""
