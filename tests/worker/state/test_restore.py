"""A shard on its way from its live holders to a rank that lost it, over real gloo."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.ranks import meet, plain_gloo, run_ranks
from tests.worker.state.parts import OPTIMIZERS, SCHEDULERS, advance, content, small, train

from keepstep.cancel import CancelToken
from keepstep.errors import PeerLost, RemoteProtocolError, StateMismatch
from keepstep.protocol.messages import Transfer
from keepstep.weights.channels.group import BUCKET_TAG
from keepstep.weights.device import stages
from keepstep.worker.state import neighbour, restore
from keepstep.worker.state.image import describe
from keepstep.worker.state.protected import ProtectedState
from keepstep.worker.state.restore import Source, StateTransport, receive_state, send_state

SMALL_BUCKET_BYTES = 72
"""A few dozen buckets for the small model, and a boundary in the middle of most tensors."""


class Mixed(torch.nn.Module):
    """Parameters and buffers of several types, shapes and orders of memory; some are empty, some are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)
        self.brief = torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.convolution = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.scalar = torch.nn.Parameter(torch.randn(()))
        self.nothing = torch.nn.Parameter(torch.empty(0, 7))
        self.transposed = torch.nn.Parameter(torch.randn(3, 2).t())
        self.frozen = torch.nn.Parameter(torch.randn(6), requires_grad=False)
        self.tied = self.linear.weight
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("counts", torch.randint(0, 1 << 60, (7,)))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("empty", torch.empty(0, dtype=torch.int32))
        self.register_buffer("precise", torch.randn(2, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x)) * self.scalar
        z = self.convolution(x.reshape(-1, 1, 2, 2).expand(-1, 3, 2, 2)).flatten(1)
        w = torch.nn.functional.linear(y, self.brief.to(torch.float32)) @ self.transposed.t()
        self.counts += 1
        return torch.cat([z, w], 1)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"small": small, "mixed": Mixed}


def make(model: str, optimizer: str, seed: int) -> tuple[ProtectedState, torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    module = MODELS[model]()
    optimizers = OPTIMIZERS[optimizer](module.parameters())
    scheduler = SCHEDULERS["multi-step"](optimizers)
    state = ProtectedState({"model": module, "optimizer": optimizers, "scheduler": scheduler})
    return state, module, optimizers, scheduler


WAYS = ["buffers", "messages"]


def choose(way: str) -> None:
    """Whether a receiver on the same machine reads in the sources' buffers; else they send."""
    if way == "messages":
        neighbour.reach = lambda place: None


def send(state: ProtectedState, step: int, rank: int, route: Transfer, group: Any, moved: Any = lambda: None) -> None:
    header, blocks = describe(state, step)
    held, way = [block.held for block in blocks], StateTransport(group, CancelToken())
    send_state(header, held, rank, route, way, Source(SMALL_BUCKET_BYTES), moved)


def receive(state: ProtectedState, step: int, route: Transfer, group: Any, moved: Any = lambda: None) -> int:
    return receive_state(state, step, route.receivers[-1], route, StateTransport(group, CancelToken()), moved)


def transfer(
    rank: int, size: int, path: Path, way: str, model: str, optimizer: str, route: Transfer, prepared: int, seed: int
) -> tuple[Any, list[bytes], int, int]:
    """Sources have trained three steps; receivers ``prepared`` other ones. Then all train two more steps."""
    choose(way)
    is_source = rank in route.sources
    state, module, optimizers, scheduler = make(model, optimizer, seed if is_source else seed + 1)
    for step in range(3 if is_source else prepared):
        train(module, [optimizers], 1, seed + step + (0 if is_source else 50))
        advance(scheduler, 0.0)
    if is_source:
        optimizers.zero_grad()
    group = plain_gloo(path, rank, size)
    moved = []
    before = content(state)
    if is_source:
        send(state, 3, rank, route, group, lambda: moved.append(1))
        assert content(state) == before, "a source is only read"
        received = 0
    else:
        parameters = [id(parameter) for parameter in module.parameters()]
        received = receive_state(state, 3, rank, route, StateTransport(group, CancelToken()), lambda: moved.append(1))
        assert content(state) != before
        assert [id(parameter) for parameter in module.parameters()] == parameters, "filled in place"
    after, digest = content(state), state.digest()
    gradients = [parameter.grad is None for parameter in module.parameters()]
    train(module, [optimizers], 2, seed + 9)
    meet(path, size, "through")
    return (after, digest, gradients), list(content(state)[0].values()), received, len(moved)


ROUTES = {
    "1 to 1": Transfer((0,), (1,)),
    "1 to 2": Transfer((1,), (0, 2)),
    "2 to 1": Transfer((0, 2), (1,)),
    "2 to 2": Transfer((3, 1), (0, 2)),
    "3 to 1": Transfer((2, 0, 3), (1,)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROUTES)
def test_every_receiver_becomes_a_replica(name: str, way: str, tmp_path: Path, seed: int) -> None:
    route = ROUTES[name]
    size = len(route.sources) + len(route.receivers)
    answers = run_ranks(size, transfer, tmp_path, way, "mixed", "adamw", route, 0, seed)
    assert_replicas(answers, route)
    moved = [count for _state, _later, _received, count in answers]
    num_buckets = moved[route.receivers[0]]
    assert num_buckets > 10
    shares = [moved[source] for source in route.sources]
    assert sum(shares) == num_buckets
    assert max(shares) <= 2 * min(shares), "the sources share the work"


def assert_replicas(answers: list[Any], route: Transfer) -> None:
    (source, _digest, gradients), later, _received, _moved = answers[route.sources[0]]
    assert all(gradients)
    for answer in answers:
        (after, digest, own), own_later, _own_received, _own_moved = answer
        assert after == source
        assert digest == _digest
        assert own == gradients
        assert own_later == later, "equal, but it goes on in another way"
    num_bytes = {answers[rank][2] for rank in route.receivers}
    assert num_bytes == {sum(map(len, source[0].values()))}


@pytest.mark.parametrize("prepared", [0, 2], ids=["fresh", "with other state"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adagrad", "sgd", "nadam"])
def test_every_optimizer_and_whatever_the_receiver_has(
    optimizer: str, prepared: int, tmp_path: Path, seed: int
) -> None:
    route = Transfer((0,), (1,))
    assert_replicas(run_ranks(2, transfer, tmp_path, "buffers", "small", optimizer, route, prepared, seed), route)


def onto_a_torn_state(rank: int, size: int, path: Path, how: str, seed: int) -> Any:
    state, module, optimizer, _scheduler = make("small", "adamw", seed + rank)
    train(module, [optimizer], 2, seed + rank)
    if rank == 0:
        if how == "source has less":
            optimizer.state.pop(module[3].bias)
        for parameter in module.parameters():
            parameter.grad = None
    else:
        states = optimizer.state
        match how:
            case "a tensor is missing":
                del states[module[0].weight]["exp_avg"]
            case "a parameter is missing":
                del states[module[0].weight]
            case "another shape":
                states[module[0].weight]["exp_avg"] = torch.ones(2)
            case "another type":
                states[module[0].weight]["exp_avg"] = states[module[0].weight]["exp_avg"].double()
            case "one too many":
                states[module[0].weight]["max_exp_avg_sq"] = torch.ones(5, 4)
            case "a number in place of a tensor":
                states[module[0].weight]["step"] = 5
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 0, 0, Transfer((0,), (1,)), group)
    else:
        receive(state, 0, Transfer((0,), (1,)), group)
    return content(state), state.digest()


@pytest.mark.parametrize(
    "how",
    [
        "whole",
        "source has less",
        "a tensor is missing",
        "a parameter is missing",
        "another shape",
        "another type",
        "one too many",
        "a number in place of a tensor",
    ],
)
def test_a_torn_optimizer_state_is_replaced(how: str, tmp_path: Path, seed: int) -> None:
    source, receiver = run_ranks(2, onto_a_torn_state, tmp_path, how, seed)
    assert receiver == source


def gradients_of(rank: int, size: int, path: Path) -> list[list[float] | None]:
    model = small()
    state = ProtectedState({"model": model})
    parameters = list(model.parameters())
    if rank == 0:
        parameters[1].grad = torch.zeros_like(parameters[1])
    else:
        for parameter in parameters[1:3]:
            parameter.grad = torch.ones_like(parameter)
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 0, 0, Transfer((0,), (1,)), group)
    else:
        receive(state, 0, Transfer((0,), (1,)), group)
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


def modes_of(rank: int, size: int, path: Path) -> Any:
    model = small()
    state = ProtectedState({"model": model})
    if rank == 0:
        model[1].eval()
        model[3].weight.requires_grad_(False)
    else:
        model[0].eval()
        model[0].requires_grad_(False)
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 0, 0, Transfer((0,), (1,)), group)
    else:
        receive(state, 0, Transfer((0,), (1,)), group)
    return state.modes().evaluating, state.modes().frozen


def test_a_receiver_has_switched_off_what_a_source_has(tmp_path: Path) -> None:
    """A script that freezes a layer at some step does so before that step only."""
    assert run_ranks(2, modes_of, tmp_path) == [({"model.1"}, {"model.3.weight"})] * 2


def test_a_receiver_has_the_gradients_that_a_source_has_as_zeros(tmp_path: Path) -> None:
    answers = run_ranks(2, gradients_of, tmp_path)
    assert answers[0] == answers[1] == [None, [0.0] * 5, None, None, None, None]


# ---- what does not fit ----------------------------------------------------------------------------------------------


class Another(torch.nn.Module):
    """The source's model, changed on the receiver in the way that ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64 if how == "dtype" else torch.float32))
        if how == "shape":
            self.weight = torch.nn.Parameter(torch.ones(2, 3))
        if how == "strides":
            self.weight = torch.nn.Parameter(torch.ones(2, 3).t())
        if how == "name":
            self.other = self._parameters.pop("weight")
        if how == "extra":
            self.extra = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.ones(5))


def mismatched(rank: int, size: int, path: Path, how: str) -> tuple[str, list[Any]]:
    state = ProtectedState({"model": Another(how if rank else "same")})
    before = content(state)
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 0, 0, Transfer((0,), (1,)), group)
    try:
        receive(state, 0, Transfer((0,), (1,)), group)
    except StateMismatch as error:
        return str(error), [content(state) == before]
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", "'model.weight' is float32[2, 3] on this rank and float32[3, 2] on the source"),
        ("dtype", "'model.weight' is float64[3, 2] on this rank and float32[3, 2] on the source"),
        ("name", "the source has 'model.weight', which this rank's model lacks"),
        ("extra", "this rank's model has ['model.extra'], which the source lacks"),
        ("strides", "(1, 3)"),
    ],
)
def test_a_mismatch_names_the_tensor_and_both_shapes(how: str, text: str, tmp_path: Path) -> None:
    message, untouched = run_ranks(2, mismatched, tmp_path, how, silent=frozenset({0}))[1]
    assert text in message
    assert untouched == [True]


def other_objects(rank: int, size: int, path: Path, how: str) -> str:
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, [optimizer], 1, 0)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if rank == 1:
        match how:
            case "no optimizer":
                del objects["optimizer"]
            case "other groups":
                groups = [
                    {"params": model[0].parameters()},
                    {"params": [*model[1].parameters(), *model[3].parameters()]},
                ]
                objects["optimizer"] = torch.optim.AdamW(groups, lr=0.1)
    elif how == "no scheduler":
        objects["scheduler"] = SCHEDULERS["step"](optimizer)
    state = ProtectedState(objects)
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 0, 0, Transfer((0,), (1,)), group)
    try:
        receive(state, 0, Transfer((0,), (1,)), group)
    except StateMismatch as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("how", ["no optimizer", "no scheduler", "other groups"])
def test_other_protected_objects_are_a_mismatch_too(how: str, tmp_path: Path) -> None:
    message = run_ranks(2, other_objects, tmp_path, how, silent=frozenset({0}))[1]
    assert "optimizer" in message or "scheduler" in message


class Damaging:
    """A group that changes one bit of the ``number``-th message under ``tag`` on its way."""

    def __init__(self, group: Any, tag: int, number: int) -> None:
        self._group = group
        self._tag = tag
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Any:
        if tag == self._tag:
            self._number -= 1
            if self._number == -1:
                self._kept = tensors[0].clone()  # its memory has to last until it is sent
                self._kept.view(-1)[16] ^= 64  # behind the size of a header
                tensors = [self._kept]
        return self._group.send(tensors, destination, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._group.recv(tensors, source, tag)


def damaged(rank: int, size: int, path: Path, way: str, tag: int, number: int, seed: int) -> tuple[str, Any]:
    choose(way)
    state, module, optimizer, scheduler = make("mixed", "adamw", seed + rank)
    for _ in range(3 if rank == 0 else 1):
        train(module, [optimizer], 1, seed + rank)
        advance(scheduler, 0.0)
    host = state.host_bytes()[0]
    group = plain_gloo(path, rank, size)
    if way == "buffers":
        damage_slot(number)
    if rank == 0:
        with suppress(RuntimeError):  # the receiver may leave in the middle
            send(state, 0, 0, Transfer((0,), (1,)), Damaging(group, tag, number))
    try:
        receive(state, 0, Transfer((0,), (1,)), group)
    except RemoteProtocolError as error:
        return str(error), state.host_bytes()[0] == host
    return "accepted", state.host_bytes()[0] == host


def damage_slot(number: int) -> None:
    """One bit of a bucket changes in its source's buffer after its checksum was taken."""
    seal = stages.seal

    def seal_and_damage(slot: torch.Tensor, bucket: Any, checksum: bytes) -> None:
        seal(slot, bucket, checksum)
        if bucket.index == number:
            slot[bucket.num_bytes - 1] ^= 1

    stages.seal = seal_and_damage


NOTHING = 1 << 30


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_damaged_is_accepted(way: str, tmp_path: Path, seed: int) -> None:
    """The proof that the refusals below are due to the damage."""
    arguments = (way, BUCKET_TAG, NOTHING, seed)
    assert run_ranks(2, damaged, tmp_path, *arguments, silent=frozenset({0}))[1] == ("accepted", False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("tag", "number"),
    [(BUCKET_TAG, 0), (BUCKET_TAG, 1), (BUCKET_TAG, 9)],
    ids=["first bucket", "second bucket", "tenth bucket"],
)
def test_damaged_content_is_refused(tag: int, number: int, way: str, tmp_path: Path, seed: int) -> None:
    answers = run_ranks(2, damaged, tmp_path, way, tag, number, seed, silent=frozenset({0}))
    message, host_is_untouched = answers[1]
    assert message.startswith("1 of ")
    assert message.endswith(" buckets arrived with a wrong checksum")
    assert host_is_untouched


def test_a_damaged_header_is_refused(tmp_path: Path, seed: int) -> None:
    arguments = ("messages", restore._HEADER_TAG, 0, seed)
    message, host_is_untouched = run_ranks(2, damaged, tmp_path, *arguments, silent=frozenset({0}))[1]
    assert "from rank 0 arrived with a wrong checksum" in message
    assert "bucket" not in message
    assert host_is_untouched


def in_mid_transfer(rank: int, size: int, path: Path, way: str, lost: int, seed: int) -> str:
    """One side is killed halfway."""
    choose(way)
    state, module, optimizer, _scheduler = make("mixed", "adamw", seed + rank)
    train(module, [optimizer], 1, seed + rank)
    group = plain_gloo(path, rank, size)
    count = iter(range(1 << 30))

    def moved() -> None:
        if rank == lost and next(count) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    route = Transfer((0, 1), (2,))
    with pytest.raises((RuntimeError, PeerLost, stages.CannotGoOn)):
        receive(state, 0, route, group, moved) if rank == 2 else send(state, 0, rank, route, group, moved)
    return "raised"


@pytest.mark.parametrize("way", WAYS)
def test_a_receiver_learns_that_a_source_was_lost(way: str, tmp_path: Path, seed: int) -> None:
    assert run_ranks(3, in_mid_transfer, tmp_path, way, 1, seed, silent=frozenset({0, 1}))[2] == "raised"


def forged(rank: int, size: int, path: Path, what: str) -> str:
    """Rank 0 says something that no source says."""
    state = ProtectedState({"model": small()})
    group = plain_gloo(path, rank, size)
    if rank == 0:
        if what == "nonsense":
            restore._send_sealed(b"\xc1ab", 1, group)
        else:
            message = torch.zeros(restore._SHORT_BYTES, dtype=torch.uint8)
            message[:8] = torch.frombuffer(
                bytearray({"empty": 0, "huge": 1 << 40}[what].to_bytes(8, "little")), dtype=torch.uint8
            )
            group.send([message], 1, restore._HEADER_TAG).wait()
        meet(path, size, "never")
    try:
        receive(state, 0, Transfer((0,), (1,)), group)
    except RemoteProtocolError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("empty", "rank 0 announces a header of 0 bytes; at most 1073741824 are allowed"),
        ("huge", "rank 0 announces a header of 1099511627776 bytes"),
        ("nonsense", "rank 0 sent"),
    ],
)
def test_a_forged_header_is_refused(what: str, text: str, tmp_path: Path) -> None:
    assert run_ranks(2, forged, tmp_path, what, silent=frozenset({0}))[1].startswith(text)


def at_another_step(rank: int, size: int, path: Path) -> str:
    state = ProtectedState({"model": small()})
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 4, 0, Transfer((0,), (1,)), group)
    try:
        receive(state, 3, Transfer((0,), (1,)), group)
    except RemoteProtocolError as error:
        return str(error)
    return "accepted"


def test_a_state_of_another_step_is_refused(tmp_path: Path) -> None:
    message = run_ranks(2, at_another_step, tmp_path, silent=frozenset({0}))[1]
    assert message == "rank 0 sends the state of step 4, expected 3"


def nothing_but_empty_tensors(rank: int, size: int, path: Path) -> int:
    model = torch.nn.Linear(0, 0)
    state = ProtectedState({"model": model})
    group = plain_gloo(path, rank, size)
    if rank == 0:
        send(state, 0, 0, Transfer((0,), (1,)), group)
        meet(path, size, "through")
        return 0
    received = receive(state, 0, Transfer((0,), (1,)), group)
    meet(path, size, "through")
    return received


def test_a_model_without_a_single_byte(tmp_path: Path) -> None:
    assert run_ranks(2, nothing_but_empty_tensors, tmp_path) == [0, 0]
