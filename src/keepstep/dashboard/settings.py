"""Settings of a dashboard's process."""

from __future__ import annotations

import msgspec


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the dashboard's process reads as a line of JSON from standard input.

    So the token appears neither in the process list nor in the environment.
    """

    folder: str
    """Folder of a run, or of several runs."""
    descriptor: int
    """File descriptor of the inherited listening socket."""
    token: str
    cookie: str
