"""Servers of inference engines: how they change to a new version of the weights, by their own HTTP routes.

A change is a transaction: no new request begins, running ones end, the version is loaded, everything that was computed
with the old weights is discarded, requests go on. See docs/integrations/README.md.
"""
