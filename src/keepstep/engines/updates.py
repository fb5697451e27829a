"""Brings each version to several servers, each for itself: one that is gone or slow holds up no other one."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from keepstep.engines.server import NewVersion, Server
from keepstep.engines.watcher import ChangeWatcher
from keepstep.errors import ConfigurationError, KeepstepError, LoadError, SubscriberLost

LOOK_S = 1.0
"""How often each server is asked for its version: so one that was restarted, or was gone, gets the newest one."""
MAX_PAUSE_S = 30.0
"""The longest pause before a server that has refused the newest version is asked to load it again."""


class ServerUpdates:
    """Has servers change to each version. It owns one thread for each server."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        memory: str | Path = "/dev/shm",
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Args:
        servers: the servers. Only one process at a time may drive each of them.
        memory: parent of the folder for versions in files.
        note: gets a line for each change of a server's state.

        Raises:
            ConfigurationError: another process on this machine drives one of them, one is named twice, or ``memory`` is
                no folder.
        """
        if len({server.url for server in servers}) < len(servers) or not servers:
            raise ConfigurationError(f"servers: {', '.join(map(str, servers)) or 'none'}; name one or more, each once")
        with contextlib.ExitStack() as stack:
            self.files: Path | None = None
            """A folder for versions in files, if a server reads files. It is deleted at the end, also by SIGKILL."""
            if any(server.reads_files for server in servers):
                try:
                    folder = tempfile.TemporaryDirectory(prefix="keepstep-versions-", dir=memory)
                except OSError as error:
                    raise ConfigurationError(f"no folder for versions in {memory}: {error}") from error
                self.files = Path(stack.enter_context(folder))
            self._watcher = stack.enter_context(contextlib.closing(ChangeWatcher(servers, self.files)))
            self._changed = threading.Condition()
            self._newest: NewVersion | None = None
            self._is_over = False
            self._drivers = [_Driver(self, server, self._watcher, note) for server in servers]
            self._open = stack.pop_all()

    @property
    def urls(self) -> list[str]:
        """All servers."""
        return [driver.server.url for driver in self._drivers]

    @property
    def versions(self) -> dict[str, tuple[int, float]]:
        """The version of each server that has one and answers, and since when (POSIX time), by URL."""
        with self._changed:
            return {d.server.url: (d.version, d.since_s) for d in self._drivers if d.version is not None}

    @property
    def failures(self) -> dict[str, KeepstepError]:
        """Why a server does not have the newest version, by URL."""
        with self._changed:
            return {d.server.url: d.error for d in self._drivers if d.error is not None}

    def in_use(self) -> list[NewVersion]:
        """Returns the versions that a server may still read, and the newest one."""
        with self._changed:
            return [each for each in (self._newest, *(d.loading for d in self._drivers)) if each is not None]

    def prepare(self, form: NewVersion) -> None:
        """Prepares all servers for versions such as this one, in the calling thread, before the first `offer`.

        Raises:
            LoadError: a server cannot load such versions; with its reason.
            KeepstepError: no server answers.
        """
        errors: list[KeepstepError] = []
        for driver in self._drivers:
            try:
                with self._watcher.watching(driver.server):
                    driver.server.prepare(form)
            except LoadError:
                raise
            except KeepstepError as error:
                errors.append(error)
        if len(errors) == len(self._drivers):
            raise errors[0]

    def offer(self, version: NewVersion) -> None:
        """Names the newest version. Returns at once."""
        with self._changed:
            self._newest = version
            for driver in self._drivers:
                driver.is_due = True
            self._changed.notify_all()
        for driver in self._drivers:
            driver.start()

    def bring(self, version: NewVersion) -> None:
        """Names the newest version, and waits until each server has it or has failed with it.

        It does not wait for servers that have failed before, unless all have.

        Raises:
            KeepstepError: no server has got it; the first one's reason.
        """
        with self._changed:
            awaited = [driver for driver in self._drivers if driver.error is None] or self._drivers
        self.offer(version)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or not any(driver.is_due for driver in awaited))
            errors = [driver.error for driver in self._drivers if driver.error is not None]
            if len(errors) == len(self._drivers):
                raise errors[0]

    def close(self) -> None:
        """Ends the threads, and then the watcher. A change that is under way is completed first."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for driver in self._drivers:
            driver.close()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Driver:
    """One server, and the thread that changes it."""

    def __init__(
        self, updates: ServerUpdates, server: Server, watcher: ChangeWatcher, note: Callable[[str], None]
    ) -> None:
        self.server = server
        self.is_due = False
        """Whether there is a version that the server has neither got nor failed with."""
        self.version: int | None = None
        self.since_s = 0.0
        self.loading: NewVersion | None = None
        """The last version that this thread has begun to load."""
        self.error: KeepstepError | None = None
        self._pause_s = LOOK_S
        self._updates, self._watcher, self._note = updates, watcher, note
        self._thread = threading.Thread(target=self._drive, name=f"keepstep-engine-{server.url}", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self.server.stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _drive(self) -> None:
        changed = self._updates._changed
        while True:
            with changed:
                changed.wait_for(lambda: self.is_due or self._updates._is_over, self._pause_s)
                if self._updates._is_over:
                    return
                is_due = self.is_due
            if is_due or not self._has_newest():
                self._change()

    def _has_newest(self) -> bool:
        """Asks the server. One that was restarted has another version than this thread knows."""
        newest = self._take_newest()
        try:
            return self.error is None and self.server.label() == str(newest.number)
        except Exception as error:  # a server may answer anything
            self._set(self.version, _as_failure(self.server, error))
            return True  # it cannot be changed now

    def _take_newest(self) -> NewVersion:
        with self._updates._changed:
            newest = self._updates._newest
            assert newest is not None
            self.loading = newest
            return newest

    def _change(self) -> None:
        begun = self._take_newest()
        try:
            with self._watcher.watching(self.server):
                version = self.server.change(self._take_newest)
        except Exception as error:  # a server may answer anything; who waits for the version is told
            self._set(self.version, _as_failure(self.server, error), after=begun)
        else:
            self._set(version, None, after=begun)

    def _set(self, version: int | None, error: KeepstepError | None, after: NewVersion | None = None) -> None:
        with self._updates._changed:
            if str(error) != str(self.error) and error is not None:
                self._note(f"{self.server}: {error}")
            if version != self.version or (error is None and self.error is not None):
                self._note(f"{self.server} has version {version}")
                self.since_s = time.time()
            self.version = (
                None if isinstance(error, SubscriberLost) else version
            )  # it may be restarted with another one
            self.error = error
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if isinstance(error, LoadError) else LOOK_S
            newest = self._updates._newest
            if after is not None and (newest is after or (newest is not None and newest.number == version)):
                self.is_due = False
            self._updates._changed.notify_all()


def _as_failure(server: Server, error: Exception) -> KeepstepError:
    """Returns the error, as one of keepstep's that names the server."""
    if isinstance(error, KeepstepError):
        return error
    reason = LoadError(f"{server}: {error!r}")
    reason.__cause__ = error
    return reason
