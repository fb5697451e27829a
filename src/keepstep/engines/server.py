"""One inference server: its HTTP routes, and what a change of weights is made of."""

from __future__ import annotations

import abc
import contextlib
import enum
import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from keepstep.errors import ConfigurationError, KeepstepError, LoadError, SubscriberLost

T = TypeVar("T")
ANSWER_S = 300.0
"""Default time for a server to complete its running requests, and to load a version."""
SHORT_S = 5.0
"""Timeout of a request that a live server answers at once, in seconds."""
RELEASE_S = 10.0
"""Within this time after the death of what drives a server, the server answers with one whole version."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.02, 1.0
"""Pauses between two calls of a server that has refused one, in seconds."""
MAX_REASON = 2000
"""Characters of a server's answer that an error message quotes."""


class Running(enum.StrEnum):
    """What becomes of requests that run when a version comes."""

    DRAIN = "drain"
    """They are completed with the old weights first. Each answer is that of one version."""
    IN_FLIGHT = "in-flight"
    """They are interrupted, and go on with the new weights: their keys and values are computed again from all of their
    tokens, but the tokens before the change are those of the old version."""


@dataclass(frozen=True)
class NewVersion:
    """A published version.

    Attributes:
        number: its number.
        folder: the publishers' folder on the server's machine.
        tensors: name, dtype (such as ``bfloat16``) and whole shape of each published tensor.
        path: a folder with the version as a checkpoint, on the server's machine; None if no server needs one.
    """

    number: int
    folder: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    path: Path | None = None


class Server(abc.ABC):
    """An inference server. One thread at a time calls it."""

    kind: ClassVar[str]
    """The engine's name, as in the flags of ``keepstep weights load``."""
    reads_files: ClassVar[bool] = False
    """Whether it loads versions from files."""

    def __init__(
        self, url: str, *, running: Running = Running.DRAIN, api_key: str | None = None, answer_s: float = ANSWER_S
    ) -> None:
        """Args:
        url: base URL of the server, such as ``http://127.0.0.1:8000``.
        running: what becomes of running requests when a version comes; its value as a string will do.
        api_key: the server's API key, for a server that has one.
        answer_s: timeout for the server to complete its running requests, and to load a version, in seconds.

        Raises:
            ConfigurationError: this is no URL of a server, or ``running`` is not one of `Running`.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
        if running not in list(Running):
            raise ConfigurationError(f"running={running!r}: choose one of {', '.join(Running)}")
        self.url, self.running, self.api_key, self.answer_s = url.rstrip("/"), Running(running), api_key, answer_s
        self._prepared: NewVersion | None = None
        """A version with the folder and the tensors for which the server is prepared. None: it has to be prepared."""
        self.stop = threading.Event()
        """Ends a wait between two calls."""

    def described(self) -> dict[str, str | None]:
        """Returns what another process needs to `end` what is open at this server, as plain data."""
        return {"kind": self.kind, "url": self.url, "api_key": self.api_key}

    @abc.abstractmethod
    def label(self) -> str:
        """Returns what the server calls the version of its weights.

        Raises:
            KeepstepError: the server did not answer.
        """

    @abc.abstractmethod
    def prepare(self, version: NewVersion) -> None:
        """Ends a change that an earlier driver has left open, and prepares the server for versions such as this one.

        Raises:
            LoadError: the server cannot load such versions, or refused; with its reason.
            KeepstepError: the server did not answer.
        """

    @abc.abstractmethod
    def end(self) -> None:
        """Ends a change that was left open: afterwards the server answers, with one whole version and empty caches.

        It does no harm where no change is open.

        Raises:
            LoadError: the server holds parts of a version, and stays out of service.
            KeepstepError: the server did not answer, or refused.
        """

    @abc.abstractmethod
    def pause(self) -> None:
        """Lets no new request begin, and waits until no request is computed any more.

        Raises:
            KeepstepError: the server did not answer, or refused; it may be paused nevertheless.
        """

    @abc.abstractmethod
    def resume(self) -> None:
        """Discards what was computed before `pause`, and lets requests go on.

        Raises:
            KeepstepError: the server did not answer, or refused; it stays paused.
        """

    @abc.abstractmethod
    def change(self, newest: Callable[[], NewVersion]) -> int:
        """Changes the server's weights, and returns the version that it then has.

        If it fails, the server answers with its former version, or is out of service until a later change.

        Args:
            newest: returns the version to load; another one, as soon as a newer one has come.

        Raises:
            KeepstepError: the server did not answer, or refused; with its reason.
        """

    @contextlib.contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """A context for a change. If the change fails, the server is not left in it, and is prepared anew for the next.

        Raises:
            LoadError: the server could not be brought out of the change either; with both reasons.
        """
        try:
            yield
        except BaseException as error:  # also on KeyboardInterrupt: the server must not stay paused
            self._prepared = None
            try:
                self.end()
            except KeepstepError as second:
                if str(second) != str(error):
                    raise LoadError(f"{error}; then: {second}") from error
            raise

    def get(self, path: str) -> Any:
        """Returns the JSON of a route."""
        return self._call(path, None, "GET", SHORT_S)

    def post(self, path: str, content: object = None, timeout_s: float | None = None) -> Any:
        """Calls a route of the server, and returns its JSON, or None.

        Raises:
            SubscriberLost: the server cannot be reached, or has not answered in time.
            LoadError: it answered with an error; the message contains the server's own text.
        """
        return self._call(path, content, "POST", self.answer_s if timeout_s is None else timeout_s)

    def _call(self, path: str, content: object, method: str, timeout_s: float) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if self.api_key is not None:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        route = "/" + path.partition("?")[0]
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise LoadError(f"{self.url} answered {route} with {error.code}: {_reason(error.read())}") from None
        except (OSError, http.client.HTTPException) as error:
            raise SubscriberLost(f"{self.url} has not answered {route}: {error}") from None
        try:
            return json.loads(body) if body else None
        except ValueError:
            return None

    def repeat(self, attempt: Callable[[], T], within_s: float) -> T:
        """Calls ``attempt`` until it raises no `LoadError`, and returns what it returns.

        The pauses between the calls become longer, since engines log each error with its traceback.

        Args:
            within_s: seconds after which the error is raised.
        """
        until_s, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except LoadError:
                if time.monotonic() + pause_s > until_s or self.stop.wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def __str__(self) -> str:
        return f"{self.kind} at {self.url}"


def _reason(body: bytes) -> str:
    """Returns the text in an error answer: engines put it into ``message``, sometimes inside of ``error``."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:MAX_REASON]
