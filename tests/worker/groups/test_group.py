"""The surviving group over real gloo, in real processes: the same as gloo while up, echo while down, and up again."""

import os
import resource
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.groups.collectives import COLLECTIVES, own, run_all
from tests.worker.ranks import Watcher, file_store, join, meet, registry_of, run_ranks
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import PeerLost
from keepstep.worker.groups.group import SurvivingGroup
from keepstep.worker.groups.registry import GroupRegistry

OBJECTS = ("broadcast_object_list", "scatter_object_list", "recv_object_list")
"""In echo there is no object to be received, and what a receiver has allocated must not be unpickled."""


# ---- the same as gloo -----------------------------------------------------------------------------------------------


def on_gloo(rank: int, size: int, path: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", store=file_store(path), rank=rank, world_size=size)
    return run_all(rank, size)


def on_keepstep(rank: int, size: int, path: Path) -> tuple[dict[str, Any], Watcher]:
    watcher = Watcher()
    join(path, rank, size, watcher)
    return run_all(rank, size), watcher


Results = dict[int, tuple[list[dict[str, Any]], list[dict[str, Any]], list[Watcher]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank of 2 and of 3 got from gloo and from the surviving group."""
    found: Results = {}
    for size in (2, 3):
        expected = run_ranks(size, on_gloo, tmp_path_factory.mktemp("gloo"))
        answers = run_ranks(size, on_keepstep, tmp_path_factory.mktemp("keepstep"))
        found[size] = expected, [values for values, _watcher in answers], [watcher for _values, watcher in answers]
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_what_gloo_gives(name: str, size: int, results: Results) -> None:
    expected = [values[name] for values in results[size][0]]
    assert not any(isinstance(value, str) for value in expected), f"gloo itself failed: {expected}"
    values = [values[name] for values in results[size][1]]
    assert values == expected


def test_every_collective_is_counted_in_and_out(results: Results) -> None:
    for _expected, _values, watchers in results.values():
        for watcher in watchers:
            assert watcher.num_entered == watcher.num_left > 20
            assert watcher.num_awaited == watcher.num_came <= watcher.num_left
            assert (watcher.num_echoed, watcher.errors) == (0, [])


def named_and_awaited(rank: int, size: int, path: Path) -> tuple[list[tuple[str, str, int]], list[int]]:
    """What a group tells of its operations, and how many of them something waits for as it goes on."""
    watcher = Watcher()
    join(path, rank, size, watcher)
    pair = dist.new_group([0, 1])
    watcher.operations.clear()
    awaited: list[int] = []

    def look() -> None:
        awaited.append(watcher.num_awaited - watcher.num_came)

    tensor, other = torch.ones(2), 1 - rank
    dist.all_gather([torch.ones(2), torch.ones(2)], tensor, group=pair)
    look()
    unheeded = dist.irecv(torch.ones(2), other)  # no message ever comes, and the script never asks
    look()
    pending = dist.irecv(torch.ones(2), other, tag=1)
    assert not pending.is_completed()
    look()
    meet(path, size, "looked")
    dist.send(tensor, other, tag=1)
    pending.wait()
    look()
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().wait()
    work.wait()
    meet(path, size, "seen")
    look()
    assert not unheeded.is_completed()
    return [(group, str(operation), peer) for group, operation, peer in watcher.operations], awaited


def test_an_operation_is_reported_by_name_and_peer_and_awaited_only_when_the_script_asks_for_it(tmp_path: Path) -> None:
    answers = run_ranks(2, named_and_awaited, tmp_path)
    for rank, (operations, awaited) in enumerate(answers):
        assert operations == [
            ("0-1.1", "all_gather", -1),
            ("world", "recv", 1 - rank),
            ("world", "recv", 1 - rank),
            ("world", "send", 1 - rank),
            ("world", "all_reduce", -1),
        ]
        assert awaited == [0, 0, 1, 0, 0]


def on_a_wrong_call(rank: int, size: int, path: Path) -> tuple[str, int, int, list[float]]:
    watcher = Watcher()
    join(path, rank, size, watcher)
    try:
        dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(2))
    except (RuntimeError, ValueError) as error:
        what = type(error).__name__
    after = own(rank, 2)
    dist.all_reduce(after)
    return what, watcher.num_entered, watcher.num_left, after.tolist()


def test_a_wrong_call_is_the_callers_error_and_does_no_harm(tmp_path: Path) -> None:
    answers = run_ranks(2, on_a_wrong_call, tmp_path)
    total = (own(0, 2) + own(1, 2)).tolist()
    assert answers == [(answers[0][0], 2, 2, total)] * 2


# ---- DDP ------------------------------------------------------------------------------------------------------------


class Branching(torch.nn.Module):
    """Uses one of two branches, so that find_unused_parameters has work to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)])
        self.norm = torch.nn.BatchNorm1d(7)
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.branches[step % 2](self.first(x)))))


def train(rank: int, size: int, path: Path, backend: str, settings: dict[str, Any], seed: int) -> list[bytes]:
    if backend == "gloo":
        dist.init_process_group("gloo", store=file_store(path), rank=rank, world_size=size)
    else:
        join(path, rank, size)
    torch.manual_seed(seed)
    model = DistributedDataParallel(Branching(), bucket_cap_mb=0.0002, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        torch.manual_seed(seed + 1000 * step + rank)
        # Without the search every parameter must take part, so the branch stays the same.
        branch = step if settings["find_unused_parameters"] else 0
        loss = model(torch.randn(4, 5), branch).square().mean() + sum(p.sum() * 0.01 for p in model.parameters())
        if settings["find_unused_parameters"]:
            loss = model(torch.randn(4, 5), branch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.numpy().tobytes() for value in model.state_dict().values()]


@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket-view"])
@pytest.mark.parametrize("search", [True, False], ids=["find-unused", "all-used"])
def test_ddp_trains_bit_for_bit_as_on_gloo(search: bool, view: bool, tmp_path: Path, seed: int) -> None:
    settings = {"find_unused_parameters": search, "gradient_as_bucket_view": view}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = run_ranks(3, train, tmp_path / "a", "gloo", settings, seed)
    answers = run_ranks(3, train, tmp_path / "b", "keepstep", settings, seed)
    assert answers == expected
    other = run_ranks(1, train, tmp_path, "keepstep", settings, seed)
    assert other[0] != expected[0], "one rank alone must not come to the same weights: the test would prove nothing"


# ---- down, and up again ---------------------------------------------------------------------------------------------


def through_a_failure(rank: int, size: int, path: Path) -> tuple[list[dict[str, Any]], int, list[str], list[bool]]:
    watcher = Watcher()
    registry, world = join(path, rank, size, watcher)
    first, downs = run_all(rank, size), [world.is_down]
    meet(path, size, "first life over")
    registry.take_down()
    downs.append(world.is_down)
    echoed = run_all(rank, size, only=[name for name in COLLECTIVES if name not in OBJECTS])
    downs.append(world.is_down)
    registry.connect(2, rank)
    again = run_all(rank, size)
    return [first, echoed, again], watcher.num_echoed, watcher.errors, [*downs, world.is_down]


Lives = list[tuple[list[dict[str, Any]], int, list[str], list[bool]]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return run_ranks(3, through_a_failure, tmp_path_factory.mktemp("lives"))


def test_the_next_generation_works_as_the_first(lives: Lives) -> None:
    for (first, _echoed, again), _count, errors, downs in lives:
        assert again == first
        assert errors == []
        assert downs == [False, True, True, False]


def alone(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """On a group that was never connected: a replacement's start-up."""
    registry = GroupRegistry(lambda generation, name: pytest.fail("nothing may be asked of the store"), Watcher())
    registry.join_world(rank, size, lambda: rank)
    # Sizes that come from uninitialised memory shall not take the machine's.
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return run_all(rank, size, only=names)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in OBJECTS])
def test_nothing_raises_in_echo(name: str, lives: Lives) -> None:
    values = [echoed[name] for (_first, echoed, _again), *_rest in lives]
    assert not any(isinstance(value, str) for value in values), values


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_cannot_come_in_echo_is_a_clear_error_on_who_receives(name: str) -> None:
    sender, *receivers = [values[name] for values in run_ranks(3, alone, [name])]
    assert not isinstance(sender, str)
    for value in receivers:
        assert value == f"PeerLost: {name} on group world: a failure cut the group off before all was received"


def cut_between_two(rank: int, size: int, path: Path, gather: bool) -> tuple[Any, int]:
    """The group is taken down when the sizes of the objects are known and their bytes are not."""
    watcher = Watcher()
    registry, _world = join(path, rank, size, watcher)
    resize = torch.Tensor.resize_

    def resize_after_failure(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
        registry.take_down()  # torch makes room for the longest object
        return resize(tensor, *sizes)

    torch.Tensor.resize_ = resize_after_failure  # type: ignore[assignment]  # this process ends with the test
    own_object, found = "x" * (10 + 100 * (rank == 1)), [None] * size
    if gather:
        dist.gather_object(own_object, found if rank == 0 else None, dst=0)
    else:
        dist.all_gather_object(found, own_object)
    return [each == own_object for each in found], watcher.num_echoed


def test_objects_that_are_cut_off_after_their_sizes_are_this_ranks_own(tmp_path: Path) -> None:
    (tmp_path / "gather").mkdir()
    assert run_ranks(3, cut_between_two, tmp_path, False) == [([True] * 3, 1)] * 3
    assert run_ranks(3, cut_between_two, tmp_path / "gather", True) == [([rank == 0] * 3, 1) for rank in range(3)]


def test_echo_is_as_if_every_peer_held_the_same(lives: Lives) -> None:
    for rank, ((_first, echoed, _again), count, _errors, _downs) in enumerate(lives):
        mine = ["torch.float32", [4], own(rank, 4).tolist()]
        assert echoed["broadcast"] == mine
        assert echoed["all_reduce"] == ["torch.float32", [3, 4], own(rank, 3, 4).tolist()]
        assert echoed["all_gather"] == [["torch.float32", [2, 3], own(rank, 2, 3).tolist()]] * 3
        assert echoed["all_gather_object"] == [{"rank": rank, "text": "x" * rank}] * 3
        assert echoed["reduce_scatter"] == ["torch.float32", [3], own(rank * 2, 3).tolist()]
        assert echoed["all_reduce_asynchronous"][2:] == [[True, True], [True, True]]
        assert echoed["isend_and_irecv"] == ["torch.float32", [4], [0.0] * 4]
        assert count > 20


def test_a_replacement_starts_up_alone_in_echo() -> None:
    names = [name for name in COLLECTIVES if name not in OBJECTS]
    for values in run_ranks(3, alone, names):
        assert not {name: value for name, value in values.items() if isinstance(value, str)}


def interrupted(rank: int, size: int, path: Path, echoes: bool) -> Any:
    """Rank 1 stops for good; rank 0 is cut loose from a collective that is under way."""
    watcher = Watcher(echoes)
    registry = registry_of(path, size, watcher)
    world = registry.join_world(rank, size, lambda: rank)
    world.connect(file_store(path), rank, timedelta(hours=1), lambda: False)
    meet(path, size, "connected")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    tensor, outputs = own(rank, 3), [torch.zeros(3) for _ in range(size)]
    reducing, gathering = dist.all_reduce(tensor, async_op=True), dist.all_gather(outputs, own(0, 3), async_op=True)
    future = gathering.get_future()
    threading.Thread(target=registry.take_down).start()
    answers = [reducing.wait(), gathering.wait()]
    gathered = future.wait()
    registry.take_down()  # any number of times
    dist.barrier()
    return answers, [output.tolist() for output in outputs], [t.tolist() for t in gathered[0]], watcher.errors


def test_take_down_frees_a_waiting_collective_and_fills_it_by_echo(tmp_path: Path) -> None:
    answers, outputs, gathered, errors = run_ranks(2, interrupted, tmp_path, True, silent=frozenset({1}))[0]
    assert answers == [True, True]
    assert outputs == gathered == [own(0, 3).tolist()] * 2
    assert errors == [], "the thread that takes a group down needs no report of it"


def breaking(rank: int, size: int, path: Path, echoes: bool) -> Any:
    """Rank 1 leaves; rank 0 is not told and sees its collective fail."""
    watcher = Watcher(echoes)
    _registry, world = join(path, rank, size, watcher)
    meet(path, size, "connected")
    if rank == 1:
        world.shutdown()
        return None
    outputs = [torch.zeros(3) for _ in range(size)]
    try:
        dist.all_gather(outputs, own(0, 3))
    except RuntimeError as error:
        return "raised", bool(str(error)), watcher.errors
    return "echoed", [output.tolist() for output in outputs], watcher.errors


def test_a_failed_collective_is_reported_and_echoed(tmp_path: Path) -> None:
    what, outputs, errors = run_ranks(2, breaking, tmp_path, True)[0]
    assert (what, outputs) == ("echoed", [own(0, 3).tolist()] * 2)
    assert errors
    assert all(error.startswith("world: ") for error in errors)


def test_a_failed_collective_raises_where_the_observer_wants_it(tmp_path: Path) -> None:
    what, has_text, errors = run_ranks(2, breaking, tmp_path, False)[0]
    assert (what, has_text) == ("raised", True)
    assert errors


# ---- the registry ---------------------------------------------------------------------------------------------------


def names_of_groups(rank: int, size: int, path: Path) -> list[Any]:
    registry, world = join(path, rank, size)
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([1, 0]), dist.new_group()]
    mine = [group.keepstep_name for group in groups if isinstance(group, SurvivingGroup)]
    meet(path, size, "groups made")
    registry.take_down()
    late = dist.new_group([0, 2])
    was_down = isinstance(late, SurvivingGroup) and late.is_down
    registry.connect(7, rank)
    is_up = isinstance(late, SurvivingGroup) and not late.is_down
    value = own(rank, 1)
    if rank != 1:
        dist.all_reduce(value, group=late)
    return [world.keepstep_name, mine, was_down, is_up, value.tolist(), dist.get_rank(late)]


def test_groups_are_named_by_members_and_order(tmp_path: Path) -> None:
    answers = run_ranks(3, names_of_groups, tmp_path)
    pair = (own(0, 1) + own(2, 1)).tolist()
    assert answers == [
        ["world", ["0-1.0", "0-1.1", "0-1-2.1"], True, True, pair, 0],
        ["world", ["0-1.0", "1-2.0", "0-1.1", "0-1-2.1"], False, False, own(1, 1).tolist(), -1],
        ["world", ["1-2.0", "0-1-2.1"], True, True, pair, 1],
    ]


def another_rank(rank: int, size: int, path: Path) -> list[Any]:
    """Rank 0 and rank 1 change places in generation 2, as a spare does that was given a provisional rank."""
    watcher = Watcher()
    registry = registry_of(path, size, watcher)
    place = {"rank": rank}
    registry.join_world(rank, size, lambda: place["rank"])
    registry.connect(1, rank)
    all_members = dist.new_group()
    place["rank"] = 1 - rank
    meet(path, size, "group made")
    registry.take_down()
    registry.connect(2, 1 - rank)
    tensor = own(rank, 2)
    dist.broadcast(tensor, src=0)
    outputs = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(outputs, torch.tensor([float(rank)]), group=all_members)
    return [dist.get_rank(), dist.get_rank(all_members), tensor.tolist(), torch.cat(outputs).tolist()]


def test_a_process_may_have_another_rank_in_the_next_generation(tmp_path: Path) -> None:
    sent = own(1, 2).tolist()
    assert run_ranks(2, another_rank, tmp_path) == [[1, 1, sent, [1.0, 0.0]], [0, 0, sent, [1.0, 0.0]]]


def inside_echo(rank: int, size: int, path: Path) -> Any:
    watcher = Watcher()
    _registry, world = join(path, rank, size, watcher)
    tensor = own(rank, 2)
    with world.echoing():
        with world.echoing():
            dist.all_reduce(tensor)
        assert world.is_down
        dist.all_reduce(tensor)
        assert world.inner is not None, "keepstep's own traffic does not echo"
    assert not world.is_down
    alone = tensor.tolist()
    dist.all_reduce(tensor)
    return alone, tensor.tolist(), watcher.num_echoed, watcher.num_entered


def test_echoing_lasts_for_its_block_and_is_not_reported(tmp_path: Path) -> None:
    total = (own(0, 2) + own(1, 2)).tolist()
    assert run_ranks(2, inside_echo, tmp_path) == [(own(rank, 2).tolist(), total, 0, 1) for rank in (0, 1)]


class Table(dist.Store):
    """A store in this process's memory; ``on_use`` runs at every call."""

    def __init__(self, on_use: Callable[[], None]) -> None:
        super().__init__()
        self._on_use = on_use
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._on_use()
        self._values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self._on_use()
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._on_use()

    def check(self, keys: list[str]) -> bool:
        self._on_use()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._on_use()
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])


def taken_down_while_connecting(rank: int, size: int) -> str:
    registry = GroupRegistry(lambda generation, name: Table(registry.take_down), Watcher())
    registry.join_world(rank, size, lambda: rank)
    try:
        registry.connect(1, rank)
    except RuntimeError:
        return "raised"
    return "down" if registry.world.is_down else "up"


def test_taking_down_while_connecting_is_not_forgotten() -> None:
    assert run_ranks(1, taken_down_while_connecting) in (["raised"], ["down"])


def new_group_of_a_generation_that_ends(rank: int, size: int) -> str:
    def end() -> None:
        registry.take_down()
        raise PeerLost("the generation is over")  # as the session's own store does

    registry = GroupRegistry(lambda generation, name: Table(end if name == "0.1" else lambda: None), Watcher())
    registry.join_world(rank, size, lambda: rank)
    registry.connect(1, rank)
    try:
        group = dist.new_group()
    except (RuntimeError, PeerLost) as error:
        return f"raised {type(error).__name__}"
    return "down" if group.is_down else "up"


def test_a_new_group_in_a_generation_that_ends_echoes() -> None:
    assert run_ranks(1, new_group_of_a_generation_that_ends) == ["down"]


def taken_down_before_anything_is_there_to_break(rank: int, size: int, path: Path, name: str) -> list[str]:
    """The order to stop comes when a group is about to be connected, to a rank that will never come."""
    watcher = Watcher()

    def store(generation: int, group: str) -> dist.Store:
        if group == name:
            watcher.last_over = generation
            registry.take_down()
        return file_store(path, generation, group)

    registry = GroupRegistry(store, watcher)
    registry.join_world(rank, size, lambda: rank)
    try:
        registry.connect(1, rank)
        meet(path, size, "connected")
        if rank == 0:
            assert dist.new_group().is_down
    except RuntimeError as error:
        return [str(error)]
    return watcher.errors


def test_a_stop_just_before_a_group_is_connected_is_not_forgotten(tmp_path: Path) -> None:
    down = "group world was aborted before it was connected"
    assert run_ranks(2, taken_down_before_anything_is_there_to_break, tmp_path, "world") == [[down], [down]]


def test_a_stop_just_before_a_new_group_is_connected_is_not_forgotten(tmp_path: Path) -> None:
    down = "0-1.1: group 0-1.1 was aborted before it was connected"
    assert run_ranks(2, taken_down_before_anything_is_there_to_break, tmp_path, "0-1.1") == [[down], []]
