"""Requests of scripts to the controller: once-per-job actions, and the results of the ranks' start-up."""
