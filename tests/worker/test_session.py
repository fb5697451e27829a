"""The session of a script under plain python: who it is, and what is asked of it in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.worker.ranks import run_ranks
from torch import distributed as dist
from torch.utils.data import DataLoader

import keepstep
from keepstep.errors import ConfigurationError, KeepstepError, UsageError
from keepstep.worker.session import current_session


def identity(_rank: int, _size: int) -> Any:
    assert current_session() is None
    session = keepstep.init(seed=1)
    drawn = torch.rand(1).item()
    assert keepstep.init(seed=2) is session is current_session()
    with session.once("data") as mine:
        first = mine
    with session.once("data") as mine:
        second = mine
    answers = (session.rank, session.local_rank, session.world_size, session.is_main, str(session.device))
    return answers, first, second, bool(session.once("log")), bool(session.once("log")), drawn


def test_a_script_alone_is_rank_0_of_1() -> None:
    ((answers, *once, drawn),) = run_ranks(1, identity)
    assert answers == (0, 0, 1, True, "cpu")
    assert once == [True, False, True, False]
    assert run_ranks(1, identity)[0][-1] == drawn, "start-up is seeded"


def refused(_rank: int, _size: int) -> list[str]:
    session = keepstep.init()
    model = torch.nn.Linear(1, 1)
    answers = []

    def said(kind: type[KeepstepError], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        answers.append(str(error.value))

    said(UsageError, lambda: session.steps(3))
    said(UsageError, lambda: session.publish_weights("weights", model))
    said(UsageError, lambda: session.data_rank)
    said(ConfigurationError, lambda: session.protect(model=model, checkpoint_dir="x", checkpoint_every=0))
    session = _another_session()
    session.protect(model=model, shard="expert 1")
    assert (session.data_rank, session.data_world_size) == (0, 1)
    session._data_ranks = None  # as where protect() cannot know them
    said(UsageError, lambda: session.data_world_size)
    session = _another_session()
    session.protect(model=model)
    said(UsageError, lambda: session.protect(model=model))
    said(ConfigurationError, lambda: session.steps(3, start=4))
    said(ConfigurationError, lambda: session.batches(DataLoader(range(4)), start=5))  # type: ignore[arg-type]  # map-style
    for step in session.steps(2):
        with step:
            pass
    said(UsageError, lambda: list(session.steps(5)))
    said(UsageError, lambda: session.state(best=0.0))
    return answers


def _another_session() -> keepstep.Session:
    session = current_session()
    assert session is not None
    session._state = None  # what was refused before is no first call
    return session


def test_what_is_asked_in_the_wrong_order_is_refused() -> None:
    (answers,) = run_ranks(1, refused)
    expected = (
        "steps() before protect()",
        "publish_weights() before protect()",
        "session.data_rank before protect()",
        "protect(checkpoint_every=0): allowed are 1 and more",
        "session.data_world_size: neither DDP nor FSDP2 says",
        "protect() was called twice",
        "steps(start=4): allowed are 0 to 3",
        "batches(start=5): allowed are 0 to 4",
        "steps(5) after all ranks have completed steps(2)",
        "session.state() after the first step",
    )
    for answer, words in zip(answers, expected, strict=True):
        assert answer.startswith(words)


def joined_elsewhere(_rank: int, _size: int) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigurationError) as error:
        keepstep.init()
    return str(error.value)


def test_a_process_group_of_another_maker_is_refused() -> None:
    (answer,) = run_ranks(1, joined_elsewhere)
    assert answer.startswith("torch.distributed is initialised already")
