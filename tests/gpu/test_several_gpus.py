"""What needs a GPU for each rank: NCCL between them, a lost rank, and the weights afterwards."""

import threading
from pathlib import Path

import pytest
import torch
from tests.gpu.needs import needs_gpus, needs_nccl
from tests.support.jobs import drill
from tests.worker.ranks import DEADLINE_S, Watcher, file_store, meet, run_ranks
from torch import distributed as dist

from keepstep.drill.faults import IN_A_STEP
from keepstep.worker.groups.registry import GroupRegistry

pytestmark = [needs_nccl, needs_gpus(2)]
SCRIPT = Path(__file__).parent / "scripts" / "train.py"


def joined(path: Path, rank: int, size: int) -> GroupRegistry:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = GroupRegistry(lambda generation, name: file_store(path, generation, name), Watcher(), device=device)
    groups.join_world(rank, size, lambda: rank)
    groups.connect(1, rank)
    return groups


def abort_in_the_middle(rank: int, size: int, path: Path) -> list[object]:
    """Rank 0 reduces alone: its stream stands still until another thread takes the groups down."""
    groups = joined(path, rank, size)
    stood_still = False
    if rank == 0:
        work = dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
        assert work is not None
        work.wait()  # the stream waits, the host does not
        event = torch.cuda.Event()
        event.record()
        stood_still = not event.query()
        threading.Timer(0.2, groups.take_down).start()
        event.synchronize()  # ends because the aborted operation does
    meet(path, size, "aborted")
    groups.take_down()
    groups.drain()
    groups.connect(2, rank)
    tensor = torch.full((4,), float(rank + 1), device="cuda")
    dist.all_reduce(tensor)
    return [stood_still, tensor.tolist()]


def test_an_abort_frees_a_stream_and_the_next_generation_reduces(tmp_path: Path) -> None:
    assert run_ranks(2, abort_in_the_middle, tmp_path) == [[True, [3.0] * 4], [False, [3.0] * 4]]


def keep(rank: int, size: int, path: Path) -> list[object]:
    groups = joined(path, rank, size)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    assert groups.world.drain(DEADLINE_S)
    before = groups.world._communicators
    groups.take_down()
    groups.drain()
    meet(path, size, "closed")
    groups.connect(2, rank)
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    return [groups.world._communicators is before, tensor.item()]


def test_a_group_that_is_quiet_stays(tmp_path: Path) -> None:
    assert run_ranks(2, keep, tmp_path) == [[True, 2.0]] * 2


@needs_gpus(3)
@pytest.mark.parametrize("phase", IN_A_STEP)
def test_a_rank_is_lost_in_each_phase_and_the_weights_are_the_same(phase: str, tmp_path: Path) -> None:
    fault = f"kill@step=8,phase={phase},rank=1"
    code, result, output = drill(tmp_path, "--nproc-per-node", 2, "--spares", 1, "--faults", fault, SCRIPT)
    assert code == 0, output
    assert result["identical"], output
