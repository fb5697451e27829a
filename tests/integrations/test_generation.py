"""Answers of a model of Transformers while versions are published: each is that of the one version that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.worker.ranks import DEADLINE_S
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from keepstep.errors import UsageError, WeightsNotReady
from keepstep.integrations.generation import GenerationEngine
from keepstep.weights.publisher import Buffers, Publisher

VERSIONS = range(1, 9)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
}
PROMPT = torch.tensor([[1, 2, 3]])
OPTIONS = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=MODELS)
def models(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, torch.nn.Module]:
    """What is trained, and what answers."""
    torch.manual_seed(0)
    return MODELS[request.param]().eval(), MODELS[request.param]()


@pytest.fixture
def threads() -> Iterator[None]:
    """Each answer has one, so that they do not wait for each other's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def change(model: torch.nn.Module, version: int) -> list[int]:
    """The weights of a version; what they answer."""
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.generate(PROMPT, **OPTIONS)[0].tolist()


@pytest.mark.usefixtures("threads")
def test_no_answer_mixes_two_versions(tmp_path: Path, models: tuple[torch.nn.Module, LlamaForCausalLM]) -> None:
    """Three threads ask all the time; the answers are those that each version gives by itself."""
    trained, served = models
    expected: dict[int, list[int]] = {}
    is_over = threading.Event()

    def ask() -> list[tuple[int, list[int]]]:
        answers = []
        while not is_over.is_set():
            generated = engine.generate(PROMPT, **OPTIONS)
            answers.append((generated.version, generated.output[0].tolist()))
        return answers

    with (
        Publisher(tmp_path / "w", trained, buffers=Buffers(4096)) as publisher,
        GenerationEngine(served, tmp_path / "w") as engine,
        ThreadPoolExecutor(3) as clients,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        with pytest.raises(WeightsNotReady, match="no version has arrived"):
            engine.generate(PROMPT, **OPTIONS)
        asking = []
        try:
            for version in VERSIONS:
                expected[version] = change(trained, version)
                assert not publisher.publish(version).failures
                asking = asking or [clients.submit(ask) for _ in range(3)]
        finally:
            is_over.set()
        answers = [answer for each in asking for answer in each.result()]
        last = engine.generate(PROMPT, version=VERSIONS[-1], **OPTIONS)
    assert len({tuple(each) for each in expected.values()}) == len(VERSIONS), "versions answer alike: nothing is shown"
    assert len({version for version, _answer in answers}) >= len(VERSIONS) // 2
    for version, answer in [*answers, (last.version, last.output[0].tolist())]:
        assert answer == expected[version], version


def test_an_answer_of_a_certain_version(tmp_path: Path, models: tuple[torch.nn.Module, LlamaForCausalLM]) -> None:
    """It waits for it, also where that is a lower one; without it there is none."""
    trained, served = models
    with Publisher(tmp_path / "w", trained) as publisher, GenerationEngine(served, tmp_path / "w") as engine:
        publisher.wait_for_consumers(1, DEADLINE_S)
        for version in (5, 3):
            expected = change(trained, version)
            with ThreadPoolExecutor(1) as client:
                asked = client.submit(engine.generate, PROMPT, version=version, **OPTIONS)
                publisher.publish(version)
                generated = asked.result(DEADLINE_S)
            assert (generated.version, generated.output[0].tolist()) == (version, expected)
        with (
            pytest.raises(WeightsNotReady, match=r"version 5 did not come within 0 s: version 3 is there"),
            engine.subscriber.using(0.0, version=5),
        ):
            pass


def test_keys_and_values_of_another_version_are_refused(tmp_path: Path) -> None:
    """A conversation that goes on with its cache: of the same version it may."""
    trained, served = MODELS["llama"]().eval(), MODELS["llama"]()
    with (
        Publisher(tmp_path / "w", trained) as publisher,
        GenerationEngine(served, tmp_path / "w") as engine,
    ):
        publisher.wait_for_consumers(1, DEADLINE_S)
        publisher.publish(1)
        engine.subscriber.wait_for(1, DEADLINE_S)
        cache = DynamicCache()
        answer = engine.generate(PROMPT, cache=cache, **OPTIONS).output
        returned = engine.generate(PROMPT, return_dict_in_generate=True, **OPTIONS).output.cache
        longer = torch.cat([answer, PROMPT], 1)
        engine.generate(longer, cache=cache, **OPTIONS)
        publisher.publish(2)
        engine.subscriber.wait_for(2, DEADLINE_S)
        for given, of in ((cache, "version 1"), (returned, "version 1")):
            with pytest.raises(UsageError, match=f"keys and values of {of}, and the weights are version 2"):
                engine.generate(longer, cache=given, **OPTIONS)
        given = DynamicCache()
        served.generate(PROMPT, cache=given, **OPTIONS)
        with pytest.raises(UsageError, match="keys and values of an unknown version"):
            engine.generate(longer, cache=given, **OPTIONS)
