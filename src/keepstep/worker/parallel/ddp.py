"""DistributedDataParallel: every rank holds every tensor in full, and all gradient buckets have one layout.

DDP starts with one layout and rebuilds it after its first backward, in the order in which gradients became ready. A
replacement would begin with the first layout again: its allreduce would not match (gloo then ends the process). Even a
job that is restarted as a whole adds gradients in another order for one step, which is why restarts today are not
bit-identical. Here the layout is settled before the first step, as a function of the model alone: an echoing backward
tells the reducer that gradients became ready in the reverse order of the parameters.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import ConfigurationError
from keepstep.typenames import is_named
from keepstep.weights.memory.blocks import is_dtensor
from keepstep.worker.groups.group import SurvivingGroup
from keepstep.worker.hooks import hook_after, on_gradient_of
from keepstep.worker.parallel.layout import Replicated

_UPCAST = "_AllreduceUpcastHookState"
"""The state of DDP's own hook for ``mixed_precision``. It keeps nothing from step to step."""


class DataParallel(Replicated):
    """The adapter of DistributedDataParallel."""

    def __init__(self, found: Sequence[DistributedDataParallel]) -> None:
        """Settles the bucket layout of all DDP modules.

        Args:
            found: the DDP modules, as `find_ddp` returns them.
        """
        self._ddp = found
        for module in found:
            settle_buckets(module)

            hook_after(module, self._after_forward)
        self._armed: set[DistributedDataParallel] = set()
        """Modules whose reducer waits for gradients of a forward that no backward has reached yet."""

    def _after_forward(self, module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        assert isinstance(module, DistributedDataParallel)
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not torch.compiler.is_compiling():
            self._armed.add(module)
            on_gradient_of(output, lambda _gradient: self._armed.discard(module))

    def hand_out(self) -> None:
        """Makes all ranks begin the script's code before the step, such as an evaluation, in the same way.

        A forward without a backward, as of a GAN's ``G(z).detach()``, leaves the reducer waiting. It would then reduce
        the next backward even in ``no_sync()``; that of a replacement would not.
        """
        for module in self._armed:
            settle_buckets(module)  # the reducer's own reset alone would lay out its buckets anew
        self._armed.clear()
        self.begin_step()

    def begin_step(self) -> None:
        """Makes all ranks begin the step in the same way."""
        for module in self._ddp:
            begin_alike(module)

    def before_barrier(self) -> None:
        """Gives every rank the same module buffers."""
        for module in self._ddp:
            share_buffers(module)

    def undo(self, *, in_backward: bool) -> None:
        """Settles the bucket layout again, if the step was interrupted in a backward."""
        if in_backward:
            for module in self._ddp:
                settle_buckets(module)

    def restored(self) -> None:
        """Makes restored gradients views of the buckets, if DDP was created with ``gradient_as_bucket_view``."""
        for module in self._ddp:
            if module.gradient_as_bucket_view:
                settle_buckets(module)


def find_ddp(modules: dict[str, torch.nn.Module]) -> list[DistributedDataParallel]:
    """Returns every DDP module in the protected modules.

    Raises:
        ConfigurationError: one of them cannot be protected.
    """
    found = []
    for name, module in modules.items():
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                _check(name, part)
                found.append(part)
    return found


def refuse_wrapped(modules: dict[str, torch.nn.Module]) -> None:
    """Refuses a protected module whose DDP wrapper is not protected.

    The wrapper would keep its state of an interrupted step. Ranks would then wait in different collectives, or average
    wrong gradients without an error.

    Raises:
        ConfigurationError: there is such a module; the message says what to protect.
    """
    parts = [part for module in modules.values() for part in module.modules()]
    inside = {id(each) for part in parts if type(part) is DistributedDataParallel for each in part.parameters()}
    bare = {
        id(parameter): name
        for name, module in modules.items()
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in inside and not is_dtensor(parameter)
    }
    if not bare:
        return
    # DDP leaves no trace in the module that it wraps. Looking at all objects of a process takes some 40 ms.
    for ddp in [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]:
        if name := next((bare[id(each)] for each in ddp.parameters() if id(each) in bare), None):
            raise ConfigurationError(
                f"protect({name}=...): a DistributedDataParallel trains this module, and is not protected: pass "
                f"that one, protect({name}=DistributedDataParallel(...)), or what Accelerate or Fabric has made of it"
            )


def refuse_hooks(modules: dict[str, torch.nn.Module], objects: Collection[object]) -> None:
    """Refuses communication hooks that keep unprotected state from step to step.

    Args:
        modules: the protected modules.
        objects: all other protected objects.

    Raises:
        ConfigurationError: there is such a hook; the message says what to do instead.
    """
    for name, module in modules.items():
        for part in module.modules():
            hooks = part._comm_hooks if isinstance(part, DistributedDataParallel) else ()
            for hook, state in hooks:
                is_known = state is None or isinstance(state, ProcessGroup) or is_named(state, _UPCAST)
                if not is_known and not any(state is each for each in objects):
                    raise ConfigurationError(
                        f"protect({name}=...): the communication hook {getattr(hook, '__name__', hook)} keeps a "
                        f"{type(state).__name__} from step to step, which a replacement does not get: use a hook "
                        "without a state, such as fp16_compress_hook; or, if it is the same on all ranks, give it "
                        "state_dict() and load_state_dict() and pass it to protect(), too"
                    )


def _check(name: str, ddp: DistributedDataParallel) -> None:
    if ddp.static_graph:
        raise ConfigurationError(
            f"protect({name}=...): DistributedDataParallel(static_graph=True) learns its graph in the first step, "
            "which a replacement does not see; leave static_graph off"
        )
    if ddp.find_unused_parameters and ddp.gradient_as_bucket_view:
        raise ConfigurationError(
            f"protect({name}=...): DistributedDataParallel(find_unused_parameters=True, gradient_as_bucket_view=True): "
            "with both, which gradients are views depends on the past, and a replacement rounds differently; drop one"
        )
    tables = [
        (path, part)
        for path, part in ddp.named_modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)
    ]
    sparse = [path for path, table in tables if table.sparse and table.weight.requires_grad]
    if sparse:
        raise ConfigurationError(
            f"protect({name}=...): {sparse[0]} has sparse gradients (sparse=True), which DistributedDataParallel "
            "reduces in another way, and a replacement gets dense ones; leave sparse off"
        )
    if ddp._has_rebuilt_buckets:
        raise ConfigurationError(
            f"protect({name}=...): this DistributedDataParallel has trained already and keeps the bucket layout that "
            "it got then, which a replacement does not get; call protect() before the first forward and backward"
        )
    if not isinstance(ddp.process_group, SurvivingGroup):
        raise ConfigurationError(
            f"protect({name}=...): its process group was not made by keepstep; call keepstep.init() before DDP(...), "
            "instead of torch.distributed.init_process_group()"
        )


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Brings the reducer from any state, even within a backward, to the one bucket layout of its model.

    Gradients are left as they were. With ``gradient_as_bucket_view`` existing gradients become zeroed views of the new
    buckets. (DDP divides a gradient that is a view, and multiplies any other by the inverse. For three ranks the last
    bits differ, so all ranks must have the same kind.) It costs about as much as writing all gradients once, and needs
    no other rank.
    """
    ddp.reducer._reset_state()
    if ddp.find_unused_parameters:
        return  # this mode never rebuilds: the first layout is the only one
    parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    _lend_gradients(parameters)
    # The reducer can be called only inside a backward: a hook on a scalar provides one.
    trigger = torch.zeros((), requires_grad=True)

    def announce(_gradient: torch.Tensor) -> None:
        for index in reversed(range(len(parameters))):
            ddp.reducer._autograd_hook(index)  # type: ignore[attr-defined]  # not in the stub

    trigger.register_hook(announce)
    group = ddp.process_group
    with group.echoing() if isinstance(group, SurvivingGroup) else contextlib.nullcontext():
        ddp.reducer.prepare_for_backward([])
        trigger.backward()
        ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or not ddp.gradient_as_bucket_view:
            parameter.grad = gradient
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _lend_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Gives all parameters gradients in the same memory: the reducer writes to each, and nothing reads them.

    Without gradients the reducer would allocate all of them: 8,000 page faults for 10 M parameters, 20 ms (2 cores,
    November 2026).
    """
    largest: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        largest[kind] = max(largest.get(kind, 0), parameter.numel())
    memory = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in largest.items()}
    for parameter in parameters:
        lent = memory[parameter.dtype, parameter.device]
        parameter.grad = lent.as_strided(parameter.size(), parameter.stride())


def begin_alike(ddp: DistributedDataParallel) -> None:
    """Makes the first forward of a step broadcast the module buffers on every rank, or on none.

    DDP skips the broadcast after a forward in ``no_sync`` or without gradients. After an interrupted step this flag
    depends on where each rank was stopped, and on a replacement it is as the constructor set it. Ranks that do not
    agree would wait in different collectives for ever.
    """
    if not ddp.require_forward_param_sync:  # setting an attribute of a module is slow
        ddp.require_forward_param_sync = True


def share_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcasts rank 0's module buffers, as DDP does, but before the update instead of before the next forward.

    A forward changes BatchNorm's statistics differently on each rank, and DDP keeps those of rank 0. Until DDP has
    broadcast them, rank 0 is their only holder, and its loss would lose them. With a broadcast before the gradient
    barrier, every rank of a completed step holds the same. DDP skips the broadcast after a forward without gradients (a
    GAN's generator in the discriminator's turn); each rank would then keep its own statistics.
    """
    begin_alike(ddp)
    if ddp.will_sync_module_buffers():
        ddp._sync_buffers()
