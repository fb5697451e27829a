"""Requests of scripts to the controller: once-per-job actions, and the record of the ranks' start-up exchange."""
