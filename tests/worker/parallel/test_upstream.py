"""What `docs/upstream.md` says of torch is so. A test that fails here tells that a release of torch behaves better.

Where a release behaves better already, the test holds it to that.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.worker.ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

IS_BETTER = torch.__version__ >= (2, 15)


@contextlib.contextmanager
def plain_torch(path: Path, rank: int, num_ranks: int) -> Iterator[None]:
    """Torch's own default group."""
    store = dist.FileStore(str(path / "store"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def leaked_gradients(rank: int, num_ranks: int, path: Path) -> float:
    """How far the gradients of a step are from right that comes after one which was left between two micro-batches."""
    with plain_torch(path, rank, num_ranks):
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(4, 4))
        batch = torch.randn(3, 4)

        def gradient() -> torch.Tensor:
            model.zero_grad()
            model(batch).sum().backward()
            local: torch.Tensor = model.weight.grad.to_local().clone()
            return local

        right = gradient()
        model.set_requires_gradient_sync(False)
        model(batch).sum().backward()
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        return float((gradient() - right).abs().max())


def test_fsdp2_adds_the_gradients_of_a_step_that_was_left(tmp_path: Path) -> None:
    differences = run_ranks(2, leaked_gradients, tmp_path)
    assert differences == [0.0, 0.0] if IS_BETTER else min(differences) > 0.1


def left_in_its_middle(rank: int, num_ranks: int, path: Path) -> float:
    """How far the gradient of a step is from right that comes after one which was left in its second micro-batch."""
    with plain_torch(path, rank, num_ranks):
        leaves_at = -1
        num_calls = 0

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls == leaves_at:
                raise KeyboardInterrupt
            return nn.functional.mse_loss(output, target)

        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        schedule = ScheduleGPipe(PipelineStage(layer, 0, 1, torch.device("cpu")), 2, loss_fn=loss)
        batch, another = torch.randn(4, 4), torch.randn(4, 4)

        def gradient() -> torch.Tensor:
            layer.zero_grad()
            schedule.step(batch, target=batch)
            assert layer.weight.grad is not None
            return layer.weight.grad.clone()

        right = gradient()
        leaves_at = num_calls + 2
        with contextlib.suppress(KeyboardInterrupt):
            schedule.step(another, target=another)
        return float((gradient() - right).abs().max())


def test_a_pipeline_takes_up_the_losses_of_a_step_that_was_left(tmp_path: Path) -> None:
    [difference] = run_ranks(1, left_in_its_middle, tmp_path)
    assert difference > 0.01


def statistics_after_no_batch(rank: int, num_ranks: int, path: Path) -> int:
    """How many batches BatchNorm has seen more than it was given."""
    with plain_torch(path, rank, num_ranks):
        norm = nn.BatchNorm1d(4)
        stage = PipelineStage(norm, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        batch = torch.randn(4, 4)
        schedule.step(batch, target=batch)
        assert norm.num_batches_tracked is not None
        return int(norm.num_batches_tracked) - 2


def test_the_first_step_of_a_pipeline_changes_statistics(tmp_path: Path) -> None:
    assert run_ranks(1, statistics_after_no_batch, tmp_path) == [0 if IS_BETTER else 1]


def second_step_with_ddp(rank: int, num_ranks: int, path: Path) -> str:
    """What DDP in a stage says in the second step."""
    with plain_torch(path, rank, num_ranks):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        stage = PipelineStage(ddp, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        batch = torch.randn(4, 4)
        schedule.step(batch, target=batch)
        try:
            schedule.step(batch, target=batch)
        except RuntimeError as error:
            return str(error.__cause__)
        return ""


def test_the_first_step_of_a_pipeline_reduces_its_first_micro_batch_by_itself(tmp_path: Path) -> None:
    """So DDP has noted the order of its gradients twice, and refuses to go on."""
    [said] = run_ranks(1, second_step_with_ddp, tmp_path)  # of two, one may wait for what the other does not begin
    assert "rebuilt parameter indices" in said
