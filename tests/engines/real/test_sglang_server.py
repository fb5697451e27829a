"""A real SGLang server on a CPU, ``keepstep weights load`` as a process, and clients that compare the answers.

Needs SGLang: `make test-engines` installs it in an environment of its own.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-engines")

import torch
from tests.engines.real.asking import NUM_TOKENS, PROMPTS, Load, Versions, check
from tests.engines.real.programs import Program, loading
from tests.engines.real.servers import RealServer, sglang_server, write_model

import keepstep
from keepstep.engines.server import RELEASE_S

NUM_VERSIONS = 8
NUM_KILLS = 6
BETWEEN_S = 0.5
"""Versions come so often while the loader is killed."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Its weights are those of the test before."""
    with sglang_server(write_model(tmp_path_factory.mktemp("m") / "model")) as running:
        yield running


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A publisher's folder: a short path, for it contains sockets."""
    return tmp_path_factory.mktemp("w") / "w"


def label(server: RealServer) -> str:
    return str(server.get("model_info")["weight_version"])


def has(server: RealServer, versions: Versions, number: int) -> None:
    """The server answers every prompt with this version, and says so."""
    assert [i for i in range(len(PROMPTS)) if number not in versions.answered(server, i)] == []
    assert label(server) == str(number)


def test_under_load_every_answer_is_that_of_one_version(server: RealServer, folder: Path, tmp_path: Path) -> None:
    """Also while a client hangs up in the middle of its answers."""
    versions, times = Versions(server.model, first=100), dict[int, tuple[float, float]]()
    with (
        contextlib.closing(keepstep.Publisher(folder, versions.model, copies=True)) as publisher,
        loading(folder, tmp_path / "log", server) as loader,
    ):
        publisher.publish(100)
        loader.await_line("has version 100")
        with Load(server, hangs_up=True) as load:
            for _ in range(NUM_VERSIONS):
                number = versions.train()
                begun_s = time.monotonic()
                publisher.publish(number)
                loader.await_line(f"has version {number}")
                times[number] = (begun_s, time.monotonic())
                for prompt in (0, 1, len(PROMPTS) - 1):
                    assert number in versions.answered(server, prompt)
        check(versions, load.answers, times)
        assert load.num_hung_up > NUM_VERSIONS
        has(server, versions, versions.newest)


def test_a_loader_that_is_killed_again_and_again_leaves_a_server_that_answers(
    server: RealServer, folder: Path, tmp_path: Path, seed: int
) -> None:
    """With one whole version, at any instant; and the next loader brings the newest one."""
    draw = random.Random(seed)
    versions, times = Versions(server.model, first=200), dict[int, tuple[float, float]]()
    is_over, errors = threading.Event(), list[BaseException]()
    with contextlib.closing(keepstep.Publisher(folder, versions.model, copies=True)) as publisher:

        def publish() -> None:
            try:
                while not is_over.wait(BETWEEN_S):
                    number = versions.train()
                    times[number] = (time.monotonic(), float("inf"))
                    publisher.publish(number)
            except BaseException as error:  # whatever it was fails the test
                errors.append(error)

        publisher.publish(200)
        with loading(folder, tmp_path / "log", server) as loader:
            loader.await_line("has version 200")
        with Load(server) as load:
            publishing = threading.Thread(target=publish)
            publishing.start()
            try:
                for i in range(NUM_KILLS):
                    loader = Program(tmp_path / f"log-{i}", "load", folder, "--sglang", server.url)
                    try:
                        loader.await_line("has version")
                        threading.Event().wait(draw.uniform(0.0, 2 * BETWEEN_S))
                    finally:
                        loader.kill()
                    answer = server.ask(PROMPTS[0], NUM_TOKENS, timeout_s=RELEASE_S)
                    assert versions.of(0, answer), f"no version answers {answer}"
                    print(f"killed: {loader.said()}")
            finally:
                is_over.set()
                publishing.join()
        assert errors == []
        check(versions, load.answers, times)
        with loading(folder, tmp_path / "last", server) as loader:
            loader.await_line(f"has version {versions.newest}")
            has(server, versions, versions.newest)


def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if name != "model.norm.weight"}


def reshaped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"model.norm.weight": torch.zeros(64)}


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("model.norm", "model.normal"): each for name, each in tensors.items()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without, "'model.norm.weight' of the checkpoint"),
        (reshaped, "'model.norm.weight' has shape (64,), and in the checkpoint"),
        (renamed, "'model.normal.weight' is published, and the checkpoint"),
    ],
)
def test_what_the_model_cannot_load_is_refused_by_name(
    server: RealServer, folder: Path, tmp_path: Path, change: Any, text: str
) -> None:
    """The server goes on with its version, and loads the next one that it can."""
    versions = Versions(server.model, first=300)
    bad = change({name: each.detach() for name, each in versions.model.named_parameters()})
    with (
        contextlib.closing(keepstep.Publisher(folder, versions.model, copies=True)) as publisher,
        loading(folder, tmp_path / "log", server) as loader,
    ):
        publisher.publish(300)
        loader.await_line("has version 300")
    other = folder.with_name("x")
    with (
        contextlib.closing(keepstep.Publisher(other, bad, copies=True)) as publisher,
        loading(other, server, tmp_path / "log") as loader,
    ):
        publisher.publish(301)
        loader.await_line(text)
        has(server, versions, 300)
    assert server.process.poll() is None
    other = folder.with_name("y")
    with (
        contextlib.closing(keepstep.Publisher(other, versions.model, copies=True)) as publisher,
        loading(other, server, tmp_path / "log") as loader,
    ):
        publisher.publish(versions.train(302))
        loader.await_line("has version 302")
        has(server, versions, 302)
