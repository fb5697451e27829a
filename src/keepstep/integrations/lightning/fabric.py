"""Lightning Fabric: a strategy for training loops that lose ranks.

::

    fabric = Fabric(strategy=KeepstepFabricStrategy())
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for epoch in fabric.strategy.epochs(loader, 3):
        def train_step(step, batch):
            ...                             # what was the body of the loop over batches
        epoch.run(train_step)
        ...                                 # evaluation, as before

Without ``epochs()``, `Session.protect`, `Session.batches` and `Session.epochs` take what ``setup()`` gives.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from keepstep.errors import ConfigurationError, UsageError
from keepstep.worker.loop.epochs import Epochs
from keepstep.worker.loop.foreign import numbered, warn_of_release
from keepstep.worker.session import Session, current_session, init

TESTED = ((2, 6), (2, 7))
"""Releases of Lightning for which the tests have passed, from and below."""
EXCLUDED = ("2.6.2", "2.6.3")
"""Their wheels carried malware (CVE-2026-44484)."""
_ASKS, _SETS_UP_A_LOADER = Fabric.global_rank.fget.__code__, Fabric._setup_dataloader.__code__
"""The place where Fabric reads the rank to seed loader workers."""
_REFUSED = {
    "start_method": "keepstep run starts the processes",
    "cluster_environment": "keepstep knows the ranks",
    "parallel_devices": "each rank has the device that keepstep run gave it",
    "ddp_comm_hook": "what it keeps from step to step is not protected",
    "ddp_comm_state": "what it keeps from step to step is not protected",
    "ddp_comm_wrapper": "what it keeps from step to step is not protected",
    "model_averaging_period": "the ranks' models differ between two averagings, so none could replace another",
}
"""Arguments of DDPStrategy that make no sense here, or cannot be protected."""


class KeepstepEnvironment(ClusterEnvironment):
    """The ``ClusterEnvironment`` of a keepstep job. On a spare, reading the rank waits until the spare has one."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    @property
    def creates_processes_externally(self) -> bool:
        """True: ``keepstep run`` has started the processes."""
        return True

    @property
    def main_address(self) -> str:
        """As torchrun's."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")  # environ: as torchrun sets it

    @property
    def main_port(self) -> int:
        """As torchrun's."""
        return int(os.environ.get("MASTER_PORT", "0"))  # environ: as torchrun sets it

    @staticmethod
    def detect() -> bool:
        """Whether Lightning selects this environment automatically: never."""
        return False

    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self._session.world_size

    def set_world_size(self, size: int) -> None:
        """Does nothing: keepstep sets the world size."""

    def global_rank(self) -> int:
        """This process's."""
        return self._session.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: keepstep sets the rank."""

    def local_rank(self) -> int:
        """Number of this rank among those of its node."""
        _ = self._session.rank  # the variable is set when a spare takes a rank
        return int(os.environ.get("LOCAL_RANK", "0"))  # environ: as torchrun sets it

    def node_rank(self) -> int:
        """Number of this node, as torchrun's ``GROUP_RANK``."""
        return int(os.environ.get("GROUP_RANK", "0"))  # environ: as torchrun sets it


class KeepstepFabricStrategy(DDPStrategy):
    """A ``lightning.fabric.strategies.DDPStrategy``. It calls `keepstep.init` if the script has not done so.

    A spare waits for a rank when it first reads the rank.
    """

    def __init__(self, **options: Any) -> None:
        """Args:
            options: those of ``DDPStrategy``, such as ``find_unused_parameters``.

        Raises:
            ConfigurationError: an option that cannot be protected, or a release of Lightning that is harmful.
        """
        refuse_options("KeepstepFabricStrategy", options)
        self._session = join()
        super().__init__(cluster_environment=KeepstepEnvironment(self._session), **options)
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._has_begun = False

    def epochs(self, loader: DataLoader[Any], num_epochs: int, *, accumulate: int = 1, **others: Any) -> Epochs:
        """Protects the modules and optimizers that Fabric has set up, and yields the epochs of a loader.

        See `Session.epochs`.

        Args:
            loader: a loader that ``fabric.setup_dataloaders()`` returned.
            num_epochs: number of epochs of the whole training, not of this run.
            accumulate: batches per step.
            others: further objects and arguments for `Session.protect`, such as ``scheduler=scheduler``.

        Raises:
            UsageError: this method was called before, or the script called `Session.protect` itself.
        """
        if self._has_begun:
            raise UsageError("strategy.epochs() is called a second time: one loop has all epochs")
        self._has_begun = True
        self._session.protect(**numbered("model", self._modules), **numbered("optimizer", self._optimizers), **others)
        return self._session.epochs(loader, num_epochs, accumulate=accumulate)

    # ---- what Fabric asks for -------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._session.device

    @property
    def global_rank(self) -> Any:
        """The rank of this process. On a spare, Fabric reads None to seed loader workers; see `process_dataloader`."""
        call = sys._getframe(1)
        is_for_workers = call.f_code is _ASKS and call.f_back is not None and call.f_back.f_code is _SETS_UP_A_LOADER
        return None if is_for_workers and self._session.is_waiting_spare else self._session.rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for ``DistributedSampler``. On a spare, the sampler reads the rank when it is first iterated."""
        session = self._session
        return {"num_replicas": session.world_size, "rank": None if session.is_waiting_spare else session.rank}

    def _configure_launcher(self) -> None:
        """Configures no launcher: ``keepstep run`` has started the processes."""

    def _set_world_ranks(self) -> None:
        """Does nothing: keepstep sets the rank."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Makes the workers of a loader that was set up on a spare read the rank when they start."""
        begin: Any = getattr(dataloader, "worker_init_fn", None)
        is_fabrics = isinstance(begin, functools.partial) and begin.func is pl_worker_init_function
        if is_fabrics and begin.keywords == {"rank": None}:
            dataloader.worker_init_fn = _SeedsWorker(self._session)
        return super().process_dataloader(dataloader)

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Wraps a module by DDP, and notes it for `epochs`."""
        wrapped = super().setup_module(module)
        self._modules.append(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Notes an optimizer for `epochs`."""
        self._optimizers.append(optimizer)
        wrapped: torch.optim.Optimizer = super().setup_optimizer(optimizer)
        return wrapped


def join() -> Session:
    """The session of this process. Calls `keepstep.init` if need be.

    Raises:
        ConfigurationError: the release of Lightning is harmful.
    """
    _check_version(lightning.__version__)
    session = current_session() or init(seed=global_seed())
    # Lightning has taken it from the environment, where a spare has none.
    rank_zero_only.rank = _RankOfSpare(session) if session.is_waiting_spare else session.rank
    return session


@functools.total_ordering
class _RankOfSpare:
    """The value of ``rank_zero_only.rank`` on a spare. A comparison waits for the rank, except for log messages."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __index__(self) -> int:
        return self._session.rank

    def __eq__(self, other: object) -> bool:
        asks = sys._getframe(1).f_locals.get("fn")
        is_message = getattr(asks, "__module__", "") == rank_zero_info.__module__
        return not (is_message and self._session.is_waiting_spare) and self._session.rank == other

    def __lt__(self, other: int) -> bool:
        return self._session.rank < other

    def __hash__(self) -> int:
        return hash(self._session.rank)

    def __repr__(self) -> str:
        return repr(self._session.rank)


class _SeedsWorker:
    """Seeds a loader worker as Fabric does, with the rank at the time when the worker starts."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, worker: int) -> None:
        _seed_worker(self._session.rank, worker)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_seed_worker, self._session.rank)


def _seed_worker(rank: int, worker: int) -> None:
    pl_worker_init_function(worker, rank=rank)


def global_seed() -> int:
    """The seed passed to ``seed_everything()``; 0 if the script did not call it."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))  # environ: Lightning's own


def refuse_options(name: str, options: dict[str, Any]) -> None:
    """Refuses arguments of ``DDPStrategy``.

    Raises:
        ConfigurationError: says which, and why.
    """
    for option in options.keys() & _REFUSED.keys():
        raise ConfigurationError(f"{name}({option}=...) is not supported: {_REFUSED[option]}")


def _check_version(present: str) -> None:
    if present in EXCLUDED:
        raise ConfigurationError(
            f"Lightning {present} was published with malware in its wheel (CVE-2026-44484): install another release, "
            "and consider what this process could read as known to others"
        )
    warn_of_release("Lightning", present, TESTED)
