"""A replacement's start-up gets what the ranks got in theirs, without asking them."""

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.groups.collectives import COLLECTIVES, own, run_all
from tests.worker.ranks import Watcher, registry_of, run_ranks
from torch import distributed as dist

from keepstep.errors import PeerLost, RemoteProtocolError
from keepstep.protocol.waiting.operations import Operation
from keepstep.worker.groups import startup_operations as startup
from keepstep.worker.groups.registry import GroupRegistry
from keepstep.worker.groups.startup_operations import MAX_RESULT_BYTES, OperationRecorder, OperationReplayer

SIZE = 3


class Folder:
    """Keeps values in files, which the processes of a test share."""

    def __init__(self, path: Path) -> None:
        self.path = path / "kept"
        self.path.mkdir(exist_ok=True)
        self.asked: Counter[str] = Counter()

    def keep(self, name: str, value: bytes) -> bool:
        (self.path / name.replace("/", ",")).write_bytes(value)
        return True

    def kept(self, name: str) -> bytes | None:
        self.asked[name] += 1
        file = self.path / name.replace("/", ",")
        return file.read_bytes() if file.exists() else None


def record(rank: int, size: int, path: Path, names: list[str]) -> Any:
    """The ranks' own start-up."""
    registry = registry_of(path, size, Watcher())
    recording = OperationRecorder(rank)
    registry.begin_start_up(recording)
    registry.join_world(rank, size, lambda: rank)
    registry.connect(1, rank)
    results = run_start_up(rank, size, names)
    registry.end_start_up()
    recording.hand_over(Folder(path))
    return results


def replay(process: int, size: int, path: Path, names: list[str], rank: int | None) -> Any:
    """A replacement's; it is given ``rank`` when it asks for it. None: the rank is the number of the process."""
    rank = process if rank is None else rank
    registry = GroupRegistry(lambda generation, name: pytest.fail("nothing may be asked of the store"), Watcher())
    folder, given = Folder(path), []

    def await_rank() -> int:
        given.append(rank)
        return rank

    registry.begin_start_up(OperationReplayer(folder, await_rank, lambda: given[0] if given else None))
    registry.join_world(0, size, await_rank)
    results = run_start_up(rank, size, names)
    return results, bool(given), folder.asked


def run_start_up(rank: int, size: int, names: list[str]) -> Any:
    return {name: START_UPS[name](rank, size) if name in START_UPS else run_all(rank, size, [name]) for name in names}


def a_changed_result(rank: int, size: int) -> Any:
    """What a script does with a result is its own affair."""
    statistic = own(rank, 2)
    dist.all_reduce(statistic)
    statistic /= size
    work = dist.broadcast(kept := own(rank, 3), 1, async_op=True)
    unheeded = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    kept += 1
    done = torch.tensor(float(rank))
    dist.all_reduce(done, op=dist.ReduceOp.MAX)
    assert unheeded is not None
    return statistic.tolist(), kept.tolist(), done.item()


def objects_of_the_first(rank: int, size: int) -> Any:
    """What only the rank itself could know: a replacement that sends cannot know what was sent."""
    words = [f"process {os.getpid()}" * 3, {"of": os.getpid()}]
    dist.broadcast_object_list(words, src=0)
    mine = [None]
    dist.scatter_object_list(mine, [(os.getpid(), each) for each in range(size)] if rank == 0 else None, src=0)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (rank, os.getpid(), "x" * rank))
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object((rank, os.getpid()), gathered, dst=1)
    return words, mine, everyone, gathered


def in_sub_groups(rank: int, size: int) -> Any:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return None
    words = [os.getpid()]
    dist.broadcast_object_list(words, src=2, group=pair)
    total = torch.tensor([rank + 0.5])
    dist.all_reduce(total, group=pair)
    return words, total.item()


def messages(rank: int, size: int) -> Any:
    """Sends and receives that only some ranks have, between collectives that all have."""
    ring, first = torch.zeros(2), torch.zeros(1)
    if rank == 0:
        dist.recv(first, src=2)
    if rank == 2:
        dist.send(torch.tensor([7.0]), dst=0)
    dist.all_reduce(ring)
    pending = dist.irecv(ring, (rank - 1) % size)
    dist.send(torch.full((2,), float(rank)), (rank + 1) % size)
    pending.wait()
    ends = torch.tensor([float(rank)])
    dist.broadcast(ends, src=2)
    return first.item(), ring.tolist(), ends.item()


START_UPS = {each.__name__: each for each in (a_changed_result, objects_of_the_first, in_sub_groups, messages)}
EVERYTHING = [*START_UPS, *COLLECTIVES]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the results of a start-up with everything in it are kept, and what each rank got."""
    path = tmp_path_factory.mktemp("kept")
    return path, run_ranks(SIZE, record, path, EVERYTHING)


@pytest.fixture(scope="module")
def replayed(kept: tuple[Path, list[Any]]) -> list[Any]:
    return [results for results, _given, _asked in run_ranks(SIZE, replay, kept[0], EVERYTHING, None)]


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_replacement_gets_what_the_ranks_got(name: str, kept: tuple[Path, list[Any]], replayed: list[Any]) -> None:
    assert [results[name] for results in replayed] == [results[name] for results in kept[1]]


SHARED = {"broadcast_object_list", "all_gather_object", "all_reduce", "broadcast", "all_gather"}


def test_what_is_the_same_for_all_is_had_without_a_rank(tmp_path: Path) -> None:
    names = sorted(SHARED)
    expected = run_ranks(SIZE, record, tmp_path, names)
    for results, given, asked in run_ranks(SIZE, replay, tmp_path, names, None):
        assert not given
        assert asked == {"group/world": 1}
        assert results["broadcast_object_list"] == expected[0]["broadcast_object_list"]


# ---- one process: what is and is not kept -------------------------------------------------------------------------


class Done(dist.Work):
    """An operation that has ended, or will when it is told."""

    def __init__(self, ended: bool = True) -> None:
        super().__init__()
        self.ended = ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.ended = True
        return True

    def is_completed(self) -> bool:
        return self.ended

    def is_success(self) -> bool:
        return self.ended


def recorded(path: Path, *operations: tuple[Operation, torch.Tensor]) -> Folder:
    """What one rank, the first of the world, keeps of these."""
    recording, folder = OperationRecorder(0), Folder(path)
    recording.joined("world", 0)
    for operation, tensor in operations:
        assert not recording.answer("world", operation, [tensor], -1)
        recording.follow(Done()).wait()
    recording.hand_over(folder)
    return folder


def answers(folder: Folder, *operations: tuple[Operation, torch.Tensor]) -> list[bool]:
    replaying = OperationReplayer(folder, lambda: 0, lambda: 0)
    return [replaying.answer("world", operation, [tensor], -1) for operation, tensor in operations]


def test_large_results_are_not_kept_and_not_waited_for(tmp_path: Path) -> None:
    weights = torch.ones(MAX_RESULT_BYTES // 4 + 1)
    folder = recorded(tmp_path, (Operation.BROADCAST, weights), (Operation.ALL_REDUCE, torch.tensor([7.0])))
    assert sum(file.stat().st_size for file in folder.path.iterdir()) < 1000
    small = torch.zeros(1)
    assert answers(folder, (Operation.BROADCAST, torch.zeros_like(weights))) == [False]
    assert not folder.asked
    assert answers(folder, (Operation.BROADCAST, torch.zeros_like(weights)), (Operation.ALL_REDUCE, small)) == [
        False,
        True,
    ]
    assert small.item() == 7.0


def test_all_of_a_group_together_is_bounded_and_the_rank_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "MAX_VALUE_BYTES", 20)
    both = [(Operation.ALL_REDUCE, torch.full((4,), float(each))) for each in range(2)]
    folder = recorded(tmp_path, *both)
    err = capsys.readouterr().err
    assert "rank 0: not all that ranks exchanged before the first step could be kept" in err
    assert "write it to a file that all ranks read" in err
    assert answers(folder, *both) == [True, False]


@pytest.mark.parametrize(
    ("operation", "tensor"),
    [
        (Operation.BROADCAST, torch.zeros(2)),
        (Operation.ALL_REDUCE, torch.zeros(3)),
        (Operation.ALL_REDUCE, torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_another_kind_shape_or_dtype_is_not_answered(
    tmp_path: Path, operation: Operation, tensor: torch.Tensor
) -> None:
    folder = recorded(tmp_path, (Operation.ALL_REDUCE, torch.ones(2)))
    assert answers(folder, (operation, tensor)) == [False]
    assert not tensor.any()


def test_an_operation_that_has_not_ended_is_not_kept(tmp_path: Path) -> None:
    recording, folder = OperationRecorder(0), Folder(tmp_path)
    recording.joined("world", 0)
    recording.answer("world", Operation.ALL_REDUCE, [torch.ones(2)], -1)
    recording.follow(Done(ended=False))
    recording.hand_over(folder)
    assert answers(folder, (Operation.ALL_REDUCE, torch.ones(2))) == [False]


def test_what_was_kept_is_checked(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.keep("group/world", b"not msgpack")
    with pytest.raises(RemoteProtocolError, match="group/world cannot be read"):
        answers(folder, (Operation.ALL_REDUCE, torch.ones(2)))


def unkept_objects(rank: int, size: int) -> list[str]:
    """A replacement for which nothing was kept, in both functions, sending and receiving."""
    registry = GroupRegistry(lambda generation, name: pytest.fail("nothing may be asked of the store"), Watcher())
    registry.begin_start_up(OperationReplayer(Nothing(), lambda: rank, lambda: None))
    registry.join_world(0, size, lambda: pytest.fail("torch's log of the error must not wait for a rank"))
    errors = []
    for function in (dist.broadcast_object_list, dist.scatter_object_list):
        with pytest.raises(PeerLost) as caught:
            function([None], src=rank) if function is dist.broadcast_object_list else function([None], [1] * size)
        errors.append(str(caught.value))
    return errors


class Nothing:
    """Keeps nothing."""

    def keep(self, name: str, value: bytes) -> bool:
        return False

    def kept(self, name: str) -> bytes | None:
        return None


def test_an_object_that_was_not_kept_is_a_clear_error_and_never_unpickled() -> None:
    for first, second in run_ranks(2, unkept_objects):
        assert first.startswith("broadcast_object_list on group world: a replacement does not get what the ranks")
        assert second.startswith("scatter_object_list on group world: ")
        assert "write it to a file that all ranks read" in first
