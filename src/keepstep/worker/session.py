"""The user's API: `init` and `Session`. The loops are in `keepstep.worker.loop.loops`."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import distributed as dist

from keepstep import config
from keepstep.errors import ConfigurationError, PeerLost, UsageError
from keepstep.protocol.phases import Phase
from keepstep.shared import lifeline, tagpage, tracebacks
from keepstep.shared.snapshotfile import SnapshotFile
from keepstep.systemcalls import loopback, needed
from keepstep.weights.channels.group import Carrier
from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.publisher import DEFAULT_DEADLINE_S
from keepstep.worker.alone import LinkAlone
from keepstep.worker.backends.by_device import nccl_version
from keepstep.worker.backends.communicator import Communicator
from keepstep.worker.backends.own_device import refuse_sharing
from keepstep.worker.coordination import Coordination
from keepstep.worker.exchange import StartUpExchange
from keepstep.worker.groups.objects import check_variables
from keepstep.worker.groups.registry import WORLD, GroupRegistry
from keepstep.worker.groups.store import LinkStore
from keepstep.worker.jobstore.default import DefaultStore
from keepstep.worker.jobstore.store_client import StoreClient
from keepstep.worker.link import Link
from keepstep.worker.loop.late_rank import have_samplers_wait
from keepstep.worker.loop.loops import Loops
from keepstep.worker.loop.wrapped import unwrapped
from keepstep.worker.once import Once, agreed
from keepstep.worker.parallel.choose import layout_of
from keepstep.worker.parallel.peers import data_ranks, first_tensor_peer, ranks_of_mesh
from keepstep.worker.parking import take_parked
from keepstep.worker.process.excepthook import RankInFront
from keepstep.worker.process.termination import outlive_signals
from keepstep.worker.publication import StepPublication, Voice
from keepstep.worker.recovery import Recovery
from keepstep.worker.state.checkpoint import Checkpoints
from keepstep.worker.state.forgotten import forgotten
from keepstep.worker.state.layout import check_first_step, compare_replicas
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.rng import seed_generators, seed_start_up, seed_step
from keepstep.worker.step.attempt import Attempt
from keepstep.worker.step.device_completion import completion_on
from keepstep.worker.step.second_copies import SecondCopies
from keepstep.worker.step.snapshots import Snapshots, parse_every
from keepstep.worker.step_controller import StepController
from keepstep.worker.values.attributes import State
from keepstep.worker.values.declared import DeclaredState

if TYPE_CHECKING:  # its import takes long
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_STORE_TIMEOUT = timedelta(seconds=300)
_session: Session | None = None


def init(*, seed: int = 0, rng: bool = True, timeout: timedelta | None = None) -> Session:
    """Joins the job; under plain python, runs with world size 1. Call it once, instead of ``init_process_group``.

    Args:
        seed: seed of the random numbers at the start of the script and in every step.
        rng: whether to seed the generators of Python, NumPy and torch: now, with the same seed on all ranks, so that
            they build the same model, and at the start of each step from (seed, rank, step), so that a repeated step
            draws the same numbers. Tensor-parallel ranks draw the numbers of the first rank among them. Disable it only
            if the script does the same itself.
        timeout: timeout of collectives, as `init_process_group` takes it; None: torch's default. A rank that is busy
            while the others wait for it is not replaced before.

    Returns:
        the session; a second call returns the same one.

    Raises:
        ConfigurationError: a process group exists already, another launcher started this process, torch is another one
            than those that keepstep was tested with, or the system lacks a call that keepstep needs (`CallRefused`).
        LimitReached: a limit on threads, open files or memory is reached.
    """
    global _session
    if _session is None:
        if dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is initialised already: call keepstep.init() instead of init_process_group()"
            )
        check_variables()
        with needed():
            _session = Session(config.worker_config(), seed, rng, timeout)
        if rng:
            seed_start_up(seed)
    return _session


def current_session() -> Session | None:
    """The session of this process; None if `init` was not called."""
    return _session


class Session(Loops):
    """One rank's part of a protected training job. `init` creates it; use it from the training thread only."""

    def __init__(self, settings: config.WorkerConfig | None, seed: int, rng: bool, timeout: timedelta | None) -> None:
        super().__init__(seed)
        self._settings, self._rng = settings, rng
        self._state: ProtectedState | None = None
        self._recovery: Recovery | None = None
        self._known_once: dict[str, bool] = {}
        self._resumes_at: int | None = None
        """What `resume` has given."""
        self._exchange: StartUpExchange | None = None
        self._coordination = self._connect(timeout)
        self._draws_as: int | None = None
        """The rank whose random numbers this rank draws; None for its own."""
        self._data_ranks: Sequence[int] | None = None
        self._copied_over: Communicator | None = None
        """What carries the second copy that is being made, or was made last."""
        self._declared = DeclaredState(
            lambda: self._coordination.machine.rank, lambda: self._coordination.machine.used_echo
        )

    def _connect(self, timeout: timedelta | None) -> Coordination:
        settings, parked = self._settings, take_parked()
        if settings is None:
            link: Link = LinkAlone()
            page = tagpage.TagWriter(tagpage.create("alone"))
            rank: int | None = 0
            world_size = 1
        else:
            decoder = parked.decoder if parked is not None else None
            link = Link(socket.socket(fileno=settings.link_fd), settings.worker, decoder)
            page = tagpage.TagWriter(settings.page_fd)
            line = lifeline.Lifeline(settings.lifeline_fd)
            line.hold()
            atexit.register(line.release)  # a normal exit must not look like a death
            rank, world_size = settings.rank, settings.world_size
        coordination = Coordination(link, page, os.getpid(), rank)
        if settings is not None and settings.observer is not None:
            module, _, function = settings.observer.partition(":")
            getattr(importlib.import_module(module), function)(coordination)
        if settings is not None and self.device.type == "cuda":
            refuse_sharing(settings, torch.cuda.device_count(), nccl_version())
        groups = GroupRegistry(
            lambda generation, name: LinkStore(link, generation, name, _STORE_TIMEOUT),
            coordination,
            loopback() if settings is None else settings.address,
            self.device,
        )
        coordination.groups = groups
        store = None if settings is None else DefaultStore(StoreClient(link, coordination))
        if store is not None:
            self._exchange = StartUpExchange(coordination, groups, store)
        if parked is not None:  # a parked spare joins as a spare: its rank and later orders came before the script
            coordination.join()
            for order in parked.orders:
                coordination.on_order(order)  # type: ignore[arg-type]  # the agent sends orders only
        if settings is not None:
            outlive_signals(signal.SIGTERM, signal.SIGHUP, *settings.drain_on)
            tracebacks.install(page.descriptor)
        link.listen(coordination.on_order)
        if rank is None:
            have_samplers_wait(coordination.await_rank)
        hook = sys.excepthook
        groups.join_world(rank or 0, world_size, coordination.await_rank, store, timeout)
        sys.excepthook = RankInFront(hook, lambda: coordination.machine.rank)
        if parked is None:
            coordination.join()
        return coordination

    def drains_after(self, error: BaseException) -> bool:
        """Takes part in the drain of the job after an exception that comes of its signal. For a worker's entry.

        Returns:
            whether the job drains, and this rank has done its part.
        """
        controller = self._controller
        if controller is None or not controller.is_of_drain(error):
            return False
        controller.undo()
        return controller.go_on() is None

    # ---- who am I -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank. Blocks on a spare until the spare gets a rank."""
        return self._coordination.await_rank()

    @property
    def is_waiting_spare(self) -> bool:
        """Whether this is a spare that has no rank yet. Does not block."""
        return self._coordination.machine.rank is None

    @property
    def is_late(self) -> bool:
        """Whether this process was started as a spare or in place of a lost rank. Its state then comes from other ranks
        or from its node's memory, not from a file that its script loads. Does not block."""
        return self._settings is not None and self._settings.rank is None

    @property
    def is_pretending(self) -> bool:
        """Whether a spare currently pretends to have a rank; see `pretending`."""
        return self._coordination.is_warming_up and self.is_waiting_spare

    @contextlib.contextmanager
    def pretending(self, is_wanted: bool = True) -> Iterator[None]:
        """Lets a waiting spare act as rank 0 inside the block, instead of blocking.

        Use it for code that reads the rank but needs the real one only later, and reads it again then. It has no effect
        on a process that is not a waiting spare.

        Args:
            is_wanted: False inside such a block for code that needs the real rank at once.
        """
        before = self._coordination.is_warming_up
        self._coordination.is_warming_up = is_wanted and (before or self.is_waiting_spare)
        try:
            yield
        finally:
            self._coordination.is_warming_up = before

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def data_rank(self) -> int:
        """This process's data-parallel coordinate. Ranks with the same coordinate read the same samples. Blocks on a
        spare, like `rank`.

        Raises:
            UsageError: `protect` was not called, or keepstep cannot derive the coordinate without ``data_mesh``.
        """
        return self._known_data_ranks("data_rank").index(self.rank)

    @property
    def data_world_size(self) -> int:
        """Number of data-parallel coordinates: 1 if all ranks work on the same samples.

        Raises:
            UsageError: as for `data_rank`.
        """
        return len(self._known_data_ranks("data_world_size"))

    def _known_data_ranks(self, asked: str) -> Sequence[int]:
        if self._state is None:
            raise UsageError(
                f"session.{asked} before protect(): it follows from how the model is parallelised; ask for it after "
                "session.protect(model=...)"
            )
        if self._data_ranks is None:
            raise UsageError(
                f"session.{asked}: neither DDP nor FSDP2 says which ranks have samples of their own; "
                "name them: protect(..., data_mesh=mesh['data'])"
            )
        return self._data_ranks

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, torchrun's ``LOCAL_RANK``. Blocks on a spare, like `rank`."""
        self._coordination.await_rank()
        assignment = self._coordination.machine.assignment
        if assignment is not None:
            return assignment.local_rank
        assert self._settings is not None
        assert self._settings.local_rank is not None
        return self._settings.local_rank

    @property
    def device(self) -> torch.device:
        """This process's device: the one that its node has assigned, or the CPU. Does not block on a spare."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        own = 0 if self._settings is None else self._settings.device
        return torch.device("cuda", own % torch.cuda.device_count())

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0. Does not block: False on a spare without a rank."""
        return self._coordination.machine.rank == 0

    def once(self, name: str) -> Once:
        """Returns a guard for an action that happens once per job, across recoveries, controller restarts and spares.

        ``if session.once("log"): ...`` performs the action at most once. The condition is True for one call in one
        process of the job. It stays False everywhere else, even if that process dies during the action.

        ``with session.once("data") as mine:`` waits until the action is done or is this process's turn. ``mine`` is
        True in one process at a time. If that process dies or raises in its block, ``mine`` is True in the next one,
        which may find half-done work. Once a process has completed the block, ``mine`` is False everywhere. At the end
        of the block that process waits until the controller has recorded it. Call it from the training thread.

        Args:
            name: name of the action, from 1 to 200 characters.

        Raises:
            UsageError: the name is too long or empty; or the script enters the block inside of itself.
            PeerLost: the controller did not answer within an hour.
        """
        return Once(name, self._coordination.ask_once, self._known_once)

    def agree(self, name: str, value: T) -> T:
        """Returns the same value in every process of the job: what the first call with this name has proposed.

        For what each process would compute for itself: a folder that is named by the date, the id of a run, a seed. No
        process waits for another one. A replacement, and all ranks of a job that starts over or whose controller was
        restarted, get the same value, too.

        Example: ``folder = session.agree("folder", f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}")``

        Args:
            name: name of the value, from 1 to 200 characters.
            value: what this process proposes: numbers, strings, bytes, None, and lists, tuples, sets and dicts of them,
                of at most 64 KiB.

        Raises:
            ConfigurationError: the value is too large, or cannot be sent to another process.
            UsageError: inside a step, or the name is too long or empty.
            PeerLost: the controller did not answer within an hour.
        """
        if self._coordination.phase not in (Phase.STARTING, Phase.UPDATED):
            raise UsageError(
                f"step {self._coordination.machine.steps.step}: agree({name!r}) inside of a step would have it wait "
                "for the controller: call it before the steps, or between two of them"
            )
        result: T = agreed(name, value, self._coordination.ask_once)
        return result

    @property
    def generation(self) -> int:
        """Number of the current membership: 1 at the start, one more at every recovery."""
        return self._coordination.machine.generation

    # ---- what is protected ----------------------------------------------------------------------------------------

    def protect(
        self,
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        snapshot_every: int | str = "auto",
        shard: str = "",
        data_mesh: DeviceMesh | None = None,
        per_rank: Mapping[str, Any] = MappingProxyType({}),
        **objects: Any,
    ) -> None:
        """Registers everything that a recovery must restore. Call it once, before the first step.

        Args:
            checkpoint_dir: write a checkpoint here every ``checkpoint_every`` steps (torch DCP, in the background).
                keepstep loads it when no live rank holds the state any more, and when the job is restarted.
            checkpoint_every: steps from one checkpoint to the next.
            snapshot_every: steps between two snapshots: copies of each rank's state in its node's memory. If a lost
                rank was the only holder of its shard, all ranks go back to the newest snapshot. "auto": the shortest
                interval that costs at most 1 % of the time, and no snapshots if every shard has a replica; "off": no
                snapshots.
            shard: an identifier of the part of the model that this rank holds, needed if other parts have the same
                names and shapes: experts, stages of a pipeline. Ranks with equal identifiers are replicas. DTensors
                need none.
            data_mesh: the dimensions of the job's mesh along which samples differ, for `data_rank`. Needed only if
                neither DDP nor FSDP2 reduces the gradients along them, or if FSDP2 also reduces over context-parallel
                ranks.
            per_rank: objects by name with ``state_dict()`` and ``load_state_dict()`` that differ from rank to rank,
                such as a log or counters. A replacement gets the state that the lost rank's object had. It may change
                from the start of a step to its first ``optimizer.step()``. A ``state_dict()`` is a dict with the values
                that `state` allows, and is called several times in each step.
            objects: at least one ``torch.nn.Module``; optimizers; generators of random numbers (of torch, NumPy or
                Python); anything else with ``state_dict()`` and ``load_state_dict()``: schedulers, scalers, loaders.
                Generators are seeded in each step, from the job's seed, the rank, the step and the name. The names are
                yours and must be the same on every rank.

        Raises:
            ConfigurationError: an object cannot be protected; the message says what to do.
            UsageError: called twice, or inside a step.
        """
        if self._state is not None:
            raise UsageError("protect() was called twice: give it everything in one call")
        self._declared.keep({name: unwrapped(thing) for name, thing in per_rank.items()})
        objects = {name: unwrapped(thing) for name, thing in objects.items()} | self._declared.objects
        self._state = ProtectedState(objects, layout_of(objects), shard)
        self._draws_as = first_tensor_peer(self._state.modules)
        self._data_ranks = data_ranks(objects, shard) if data_mesh is None else ranks_of_mesh(data_mesh)
        checkpoints = self._checkpoints(checkpoint_dir, checkpoint_every)
        used = {tensor.device for _name, tensor in self._state.live_tensors()}
        attempt = Attempt(self._coordination, self._state, self._declared, completion_on(self.device, used))
        snapshots = self._snapshots(snapshot_every)
        self._recovery = Recovery(
            self._coordination,
            self._state,
            attempt,
            checkpoints,
            snapshots,
            tempfile.gettempdir() if self._settings is None else self._settings.run_dir,
            None if self._settings is None else self._settings.checkpoint_root,
        )
        self._set_controller(
            StepController(
                self._coordination,
                self._state,
                attempt,
                self._recovery,
                seed_step=self._seed_step,
                final_digest=self._final_digest,
            )
        )

    def _snapshots(self, wanted: int | str) -> Snapshots | None:
        every = parse_every(wanted)
        assert self._state is not None
        if self._settings is None or every == 0:
            return None
        file = SnapshotFile(self._settings.snapshots_fd)
        show = self._coordination.show_moment
        copies = SecondCopies(file, self._background, self._second_copy_failed, show)
        return Snapshots(self._state, file, every, copies, max(1, self._settings.local_world_size), show)

    def _background(self) -> Carrier | None:
        """Carries tensors beside the training thread, in the current generation; None while the world group is down."""
        assert self._coordination.groups is not None
        self._copied_over = self._coordination.groups.world.inner
        return None if self._copied_over is None else self._copied_over.background

    def _second_copy_failed(self, error: Exception) -> None:
        """Reports a failed second copy as a lost peer, unless its connections are down, or were replaced, already. Runs
        in the copy's thread."""
        groups = self._coordination.groups
        if groups is not None and groups.world.inner is not None and groups.world.inner is self._copied_over:
            self._coordination.failed(WORLD, error)

    def _checkpoints(self, directory: str | os.PathLike[str] | None, every: int) -> Checkpoints | None:
        if directory is None:
            return None
        if every < 1:
            raise ConfigurationError(f"protect(checkpoint_every={every}): allowed are 1 and more")
        assert self._state is not None
        root = self._settings.checkpoint_root if self._settings is not None else None
        path = Path(directory) if root is None else Path(root) / Path(directory).name
        return Checkpoints(self._state, path, every)

    def state(
        self, name: str = "", /, *, per_rank: bool = False, reset: Literal["epoch"] | None = None, **values: Any
    ) -> State:
        """Declares values of the script that must survive a failure, as the attributes of one object.

        A replacement gets them, undoing a step restores them, and checkpoints contain them. Call it on every rank
        before the first step.

        Args:
            name: name of the object, if the script declares several.
            per_rank: each rank has its own values, and a replacement gets those of the rank that it replaces. They may
                be set from the start of a step to its first ``optimizer.step()``. If False, all ranks must set the same
                values, at any time.
            reset: "epoch": the values begin anew with the first step of each epoch of `batches` or `epochs`, for sums
                of an epoch. They are there at its end, also on a replacement.
            values: each attribute with its first value: numbers, strings, bytes, None, tensors, and lists, tuples,
                sets and dicts of them.

        Raises:
            ConfigurationError: a value cannot be sent to another process, or a name is declared twice.
            UsageError: called after the first step.
        """
        declared = self._declared.declare(name, per_rank, values, reset)
        if self._state is not None:
            self._state.others |= self._declared.objects
        return declared

    def publish_weights(
        self,
        folder: str | os.PathLike[str],
        weights: Weights | Mapped,
        *,
        every: int = 10,
        at_start: bool = False,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Publishes the weights at regular intervals, in the background, to every attached `keepstep.Subscriber`.

        A version is the number of steps that its weights have been trained for. A version in transfer when a rank is
        lost is skipped. Call it after `protect`, before the first step.

        Args:
            folder: where consumers on this node find the ranks; use a short path, because it contains sockets.
            weights: a module (without its DDP wrapper, because of the names), or tensors by name; a name map maps them
                to the published tensors.
            every: steps from one version to the next.
            at_start: also publish the weights at the first step, and after each recovery those at the resume step: for
                consumers that need the version of every step, including repeated ones.
            deadline_s: seconds without progress after which a consumer is left out.

        Raises:
            ConfigurationError: ``every`` is below 1.
            UsageError: `protect` was not called.
        """
        if self._recovery is None:
            raise UsageError("publish_weights() before protect(): call session.protect(model=...) first")
        link = self._coordination.link
        voice = Voice(link.worker, link.send)
        self._recovery.publish(StepPublication(Path(folder), weights, every, deadline_s, at_start, voice))

    def resume(self, load: Callable[[], int | None]) -> int:
        """Has the script load its own newest checkpoint where it starts, and returns the step with which it begins.

        It replaces "if there is a checkpoint, load it" at the start of a script. ``load`` is called on all ranks that
        start together, and not in a replacement: its state comes from the other ranks, and the newest file is another
        one by then. There the answer is that of the job's ranks. If all ranks are lost, fresh ones call ``load`` again,
        so such a job goes on as if it had keepstep's checkpoints; the newer of both counts. `steps`, `batches` and
        `epochs` begin at that step. Call it before them, on every rank; ``load`` may communicate.

        Args:
            load: loads the newest checkpoint, if there is one, and returns the number of steps that it has completed:
                ``step.index + 1`` where it was saved; at the end of an epoch of `epochs`, which counts as a step,
                ``step.index + 2``. 0 or None: there is none.

        Raises:
            UsageError: after the first step, ``load`` has returned something else or created a process group, or the
                job's ranks have not called this.
            PeerLost: in a replacement, the job's ranks have not come to their first step within an hour.
        """
        if self._coordination.phase is not Phase.STARTING:
            raise UsageError("resume() after the first step: call it before the loop")
        if self._resumes_at is not None:
            return self._resumes_at
        if self.is_late and self._exchange is not None:
            self._resumes_at = self._exchange.first_step()
            return self._resumes_at
        with contextlib.nullcontext() if self._exchange is None else self._exchange.outside():
            completed = load()
        if completed is not None and (type(completed) is not int or completed < 0):
            raise UsageError(
                f"load() of session.resume() has returned {completed!r:.80}, and not the number of steps that the "
                "checkpoint has completed (0 or None if there is none)"
            )
        self._resumes_at = completed or 0
        return self._resumes_at

    # ---- for the loops ----------------------------------------------------------------------------------------------

    def begin(self, start: int = 0) -> StepController:
        """Prepares the first step. The script, or the framework that runs its loop, calls it before that step.

        Args:
            start: see `steps`.

        Returns:
            the controller that takes this rank through its steps.

        Raises:
            UsageError: `protect` was not called.
        """
        controller = self._protected_controller("steps")
        if self._coordination.phase is Phase.STARTING:
            assert self._state is not None
            self._state.check()  # the script may have changed its modules since protect()
            self._tell_of_forgotten()
            start = self._first_step(start)
            self._check_replicas(start)
            if self._exchange is not None:
                self._exchange.end(self._resumes_at)
            controller.stand_ready(start, resumes=self._resumes_at is not None)
        return controller

    def _first_step(self, start: int) -> int:
        if self._resumes_at is None:
            return start
        if start not in (0, self._resumes_at):
            raise UsageError(
                f"the loop begins at start={start}, and session.resume() has given {self._resumes_at}: leave start out"
            )
        return self._resumes_at

    def _has_fewer_steps(self, num_steps: int) -> int | None:
        reached = self._coordination.machine.steps.parameters_at
        is_short = reached is not None and reached < num_steps and not self._coordination.machine.terminated
        return reached if is_short else None

    def _tell_of_forgotten(self) -> None:
        """Warns on rank 0, as the job begins, of objects with a state that was not given to `protect`."""
        if self._coordination.machine.rank != 0 or self.generation != 1 or self._state is None:
            return
        found: list[str] = []
        with contextlib.suppress(Exception):  # it looks into objects of any kind, and no job ends for a warning
            found = forgotten(self._state)
        for what in dict.fromkeys(found):
            print(
                f"keepstep: {what} is not protected: in a process that replaces a rank it begins anew, and the ranks "
                "then differ. Give it to protect(), too",
                file=sys.stderr,
                flush=True,
            )

    def _check_replicas(self, start: int) -> None:
        """Compares this rank's initial state with its replicas', while all ranks start together."""
        machine = self._coordination.machine
        if machine.generation == 0 or machine.used_echo or machine.rank is None or self.world_size == 1:
            return
        assert self._state is not None
        assert self._recovery is not None
        store = LinkStore(self._coordination.link, machine.generation, "start", _STORE_TIMEOUT)
        try:
            if self._resumes_at is not None:
                check_first_step(self._resumes_at, machine.rank, store)
            compare_replicas(self._state, start, machine.rank, store)
            self._recovery.start_together(machine.rank, self.world_size, store)
        except PeerLost:
            machine.echoed()  # a rank was lost while all started: this start-up does not count

    def _seed_step(self, place: int | str) -> None:
        rank = self.rank if self._draws_as is None else self._draws_as
        if self._rng:
            seed_step(self._seed, rank, place)
        if self._state is not None and self._state.generators:
            seed_generators(self._state.generators, self._seed, rank, place)

    def _final_digest(self) -> str | None:
        if self._settings is None or not self._settings.digest or self._state is None:
            return None
        return self._state.digest()
