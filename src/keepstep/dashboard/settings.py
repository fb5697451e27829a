"""Settings of a dashboard's process."""

from __future__ import annotations

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of JSON on standard input: so the token is in no process list and in no environment."""

    folder: str
    """Of a run, or of several."""
    descriptor: int
    """The listening socket, inherited."""
    token: str
    cookie: str
