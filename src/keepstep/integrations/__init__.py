"""Integrations with other frameworks. Each is optional: the rest of keepstep imports none of them."""
