"""The lease of a run as a file in its folder, for controllers on all machines with access to the folder.

The lease is one empty file whose name contains all of its data (`keepstep.protocol.lease`). A controller replaces it by
renaming the file. A rename is atomic also between the machines of a network file system, and fails if another process
was first. So a cached view of the folder can delay a controller, but never lets it take a lease that was renewed
meanwhile.

In the same folder each controller has a file with its identity. It locks the file for as long as the process lives. So
on the same machine, a controller need not wait for the lease of a dead process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

import msgspec

from keepstep.errors import ConfigurationError, KeepstepError, LeaseLost
from keepstep.protocol.lease import FIRST, Candidate, Holder, Lease, Replace
from keepstep.systemcalls import lock
from keepstep.trace.record.jobclock import this_machine

FOLDER = "lease"


class Who(msgspec.Struct, frozen=True):
    """The identity of a controller, for people and for other controllers on its machine."""

    host: str
    pid: int
    place: str
    """The machine and mount namespace of the process. Processes of one place see the same files and locks."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLease:
    """The lease of one run for one controller, which waits for the lease, holds it, and releases it."""

    def __init__(self, run_dir: Path, hold_s: float) -> None:
        """Args:
        run_dir: the run's folder.
        hold_s: another controller may take this controller's lease after so long without a renewal, in seconds.

        Raises:
            ConfigurationError: the folder cannot hold a lease.
        """
        self._folder = run_dir / FOLDER
        self._candidate = Candidate(secrets.token_hex(8), hold_s)
        self._holder: Holder | None = None
        self.taken_from: Who | None = None
        """The former holder, if the lease was not free when this controller took it."""
        self._trouble = ""
        try:
            self._set_up(run_dir)
            self._me = self._introduce()
        except OSError as error:
            raise ConfigurationError(f"--run-dir {run_dir}: holds no lease: {error}") from error

    def _set_up(self, run_dir: Path) -> None:
        """Creates the folder with a free lease in it, atomically. Does nothing if the folder exists."""
        if self._folder.exists():
            return
        draft = run_dir / f"{FOLDER}.{self._candidate.holder}"
        draft.mkdir(0o700)
        try:
            (draft / FIRST.name).touch(0o600)
            draft.rename(self._folder)
        except OSError:
            if not self._folder.is_dir():  # another one was first: it is never empty, so it is not replaced
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _introduce(self) -> int:
        path = self._file_of(self._candidate.holder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(descriptor, msgspec.json.encode(Who(socket.gethostname(), os.getpid(), _place())))
        os.fsync(descriptor)
        lock(descriptor, self._folder.parent, fcntl.LOCK_EX)
        return descriptor

    # ---- while another process holds it ------------------------------------------------------------------------------

    def look(self) -> Lease | None:
        """Reads the lease once, for `is_served` and `served_by`. None: another process is just renaming it.

        Raises:
            ConfigurationError: the folder cannot be read.
        """
        if (lease := self._look()) is not None:
            self._candidate.observe(lease, _now_s())
        return lease

    def take(self) -> bool:
        """Reads the lease once, and takes it if that is allowed. Returns whether this controller holds it now.

        Raises:
            ConfigurationError: the folder cannot be read.
        """
        lease = self.look()
        if lease is None:
            return False  # another process is just renaming it
        claim = self._candidate.claim(_now_s(), is_gone=not lease.is_free and self._is_gone(lease.holder))
        if claim is None or not self._replace(claim):
            return False
        self._holder = Holder(claim)
        if not lease.is_free:
            self.taken_from = self._who(lease.holder) or Who("an unknown host", 0, "")
            self._file_of(lease.holder).unlink(missing_ok=True)
        return True

    @property
    def is_served(self) -> bool:
        """Whether a live process certainly holds it: the lease has changed, or its holder lives on this machine."""
        seen = self._candidate.seen
        return self._candidate.num_changes > 0 or (seen is not None and self._is_here(seen.holder))

    def served_by(self) -> str:
        """Returns a text for people: who holds the lease, and how long it has not changed."""
        seen = self._candidate.seen
        if seen is None or seen.is_free:
            return "no process"
        who = self._who(seen.holder) or "an unknown process"
        return f"{who} (lease unchanged for {self._candidate.unchanged_s(_now_s()):.1f} s)"

    # ---- while this controller holds it -----------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The term of this controller's lease. Call it only while this controller holds the lease."""
        assert self._holder is not None, "it is held"
        return self._holder.lease.term

    async def keep(self) -> None:
        """Renews the lease until the task is cancelled.

        Raises:
            LeaseLost: another controller has taken the lease.
        """
        assert self._holder is not None, "it is held"
        while True:
            await asyncio.sleep(self._holder.renew_every_s)
            try:
                self._renew(self._holder)
                self._trouble = ""
            except OSError as error:  # `confirm` raises when too many renewals have failed
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    print(f"keepstep: the run's lease cannot be renewed: {error}", file=sys.stderr, flush=True)

    def confirm(self) -> None:
        """Returns only if no other process can serve the run at this moment. It may renew the lease for that.

        Raises:
            LeaseLost: another process may serve the run.
        """
        assert self._holder is not None, "it is held"
        if self._holder.may_transmit(_now_s()):
            return
        try:
            self._renew(self._holder)
        except OSError as error:
            raise LeaseLost(f"the lease of {self._folder.parent} cannot be renewed: {error}") from error
        if not self._holder.may_transmit(_now_s()):
            raise LeaseLost(f"the lease of {self._folder.parent} was renewed, but that took too long to count")

    def _renew(self, holder: Holder) -> None:
        renewal = holder.renewal(_now_s())
        if not self._replace(renewal):
            now = self._look()
            who = self._who(now.holder) if now is not None else None
            raise LeaseLost(
                f"{self._folder.parent} is served by {who or 'another controller'} by now: this one was not heard of "
                "for too long, and says nothing more"
            )
        holder.renewed(renewal)

    def close(self) -> None:
        """Releases the lease, if this controller holds it, and removes its file of identity."""
        holder, self._holder = self._holder, None
        with contextlib.suppress(OSError):
            if holder is not None:
                self._replace(holder.release())
            self._file_of(self._candidate.holder).unlink(missing_ok=True)
        os.close(self._me)

    def __enter__(self) -> RunLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the folder -------------------------------------------------------------------------------------------------

    def _look(self) -> Lease | None:
        """Returns the newest lease in the folder. Opening a folder bypasses the caches of a network file system."""
        try:
            found = [Lease.parse(name) for name in os.listdir(self._folder)]
        except OSError as error:
            raise ConfigurationError(f"{self._folder}: {error.strerror}") from error
        return max((lease for lease in found if lease is not None), default=None)

    def _replace(self, order: Replace) -> bool:
        """Carries out a replacement. Returns False if another process was first."""
        try:
            os.rename(self._folder / order.old.name, self._folder / order.new.name)
        except FileNotFoundError:
            # The server may have renamed it, and its answer may be lost. The new name contains this process's own.
            return order.new.name in os.listdir(self._folder)
        return True

    def _file_of(self, holder: str) -> Path:
        return self._folder / f"{holder}.json"

    def _who(self, holder: str) -> Who | None:
        try:
            return msgspec.json.decode(self._file_of(holder).read_bytes(), type=Who)
        except (OSError, msgspec.MsgspecError):
            return None

    def _is_gone(self, holder: str) -> bool:
        """Whether the holder's process has certainly ended. For a process on another machine, this is never certain."""
        return self._is_near(holder) and not self._is_locked(holder)

    def _is_here(self, holder: str) -> bool:
        """Whether the holder's process certainly exists; it may be stopped."""
        return self._is_near(holder) and self._is_locked(holder)

    def _is_near(self, holder: str) -> bool:
        who = self._who(holder)
        return who is not None and who.place == _place()

    def _is_locked(self, holder: str) -> bool:
        try:
            descriptor = os.open(self._file_of(holder), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True  # unknown
        try:
            lock(descriptor, self._folder.parent, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (OSError, KeepstepError):
            return True
        finally:
            os.close(descriptor)
        return False


def _now_s() -> float:
    """Returns the boot-time clock, which continues while the machine is suspended: that time counts for a lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _place() -> str:
    """Returns this process's place: the boot of its machine and its mount namespace. A container is another place."""
    return f"{this_machine()} {os.readlink('/proc/self/ns/mnt')}"
