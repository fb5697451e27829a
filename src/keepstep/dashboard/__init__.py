"""A page that shows a run while it goes on: a process of its own that reads the run's folder and serves it.

It shares nothing with the job but that folder, and is given processor time after it, so that the job does not
notice how many pages are open.
"""
