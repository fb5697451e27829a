"""A live page of a run: a separate process that reads the run's folder and serves the page.

It shares only that folder with the job, and has a lower CPU priority, so that open pages do not slow the job down.
"""
