"""Versions of a model, what each of them answers by transformers, and clients that ask a server all the time."""

from __future__ import annotations

import http.client
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.engines.real.servers import VOCABULARY, RealServer
from transformers import LlamaForCausalLM

NUM_TOKENS = 12
CLEAR = 1e-3
"""By so much the likeliest token of an expected answer is ahead of the next one: more than kernels differ."""
_draw = random.Random(1)
PREFIX = [_draw.randrange(1, VOCABULARY) for _ in range(200)]
"""Of prompts whose keys and values a server keeps."""
PROMPTS = [[*PREFIX, i] for i in range(1, 7)] + [[i, 7, 9] for i in range(1, 4)]


@torch.no_grad()
def answers_of(model: Any) -> list[tuple[list[int], list[float]]]:
    """The likeliest tokens after each prompt, and by how much each is ahead of the next one."""
    found = []
    for prompt in PROMPTS:
        answer = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.topk(torch.stack(answer.logits)[:, 0], 2).values
        found.append((answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return found


class Versions:
    """A model that is trained, and the answers of each of its versions. Equal seeds train equal versions."""

    def __init__(self, checkpoint: Path, *, first: int = 0, seed: int = 0) -> None:
        """Args:
        checkpoint: the model's folder.
        first: number of the version before the first training.
        seed: of the changes by training.
        """
        torch.set_num_threads(1)
        self.model: Any = LlamaForCausalLM.from_pretrained(checkpoint).float()
        self.newest = first
        self.expected: dict[int, list[list[int]]] = {}
        """The answer to each prompt, by version."""
        self._generator = torch.Generator().manual_seed(seed)
        if not self._note():
            self.train(first)

    def train(self, number: int | None = None, *, only: str = "") -> int:
        """Changes the weights, until all answers are clear, and returns the number of the version.

        Args:
            number: of the version; by default the next one.
            only: beginning of the names of the weights that change.
        """
        self.newest = self.newest + 1 if number is None else number
        while True:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    change = torch.randn(parameter.shape, generator=self._generator)
                    if name.startswith(only):
                        parameter.add_(change * 0.1 * parameter.abs().mean())
            if self._note():
                return self.newest

    def _note(self) -> bool:
        found = answers_of(self.model)
        if min(min(ahead) for _tokens, ahead in found) < CLEAR:
            return False
        self.expected[self.newest] = [tokens for tokens, _ahead in found]
        return True

    def answered(self, server: RealServer, prompt: int) -> list[int]:
        """Asks a server, and returns the versions that answer so. Empty: it is a mixture."""
        return self.of(prompt, server.ask(PROMPTS[prompt], NUM_TOKENS))

    def of(self, prompt: int, answer: list[int]) -> list[int]:
        """The versions that answer a prompt so."""
        return [number for number, expected in self.expected.items() if expected[prompt] == answer]


@dataclass(frozen=True)
class Answer:
    """An answer: to which prompt, and when it was asked for and there."""

    prompt: int
    tokens: list[int]
    begun_s: float
    ended_s: float


class Load:
    """Threads that ask a server all the time, inside of a ``with`` block. Any error is raised at its end."""

    def __init__(self, server: RealServer, num_threads: int = 2, *, hangs_up: bool = False) -> None:
        """Args:
        server: the server.
        num_threads: how many requests run at a time.
        hangs_up: whether one more client closes its connection in the middle of answers.
        """
        self.answers: list[Answer] = []
        self.num_hung_up = 0
        self._errors: list[BaseException] = []
        self._server, self._stop = server, threading.Event()
        works = [self._ask] * num_threads + [self._hang_up] * hangs_up
        self._threads = [threading.Thread(target=self._work, args=(each, i)) for i, each in enumerate(works)]

    def _work(self, ask: Any, number: int) -> None:
        draw = random.Random(number)
        try:
            while not self._stop.is_set():
                ask(draw)
        except BaseException as error:  # whatever it was fails the test
            self._errors.append(error)

    def _ask(self, draw: random.Random) -> None:
        prompt, begun_s = draw.randrange(len(PROMPTS)), time.monotonic()
        tokens = self._server.ask(PROMPTS[prompt], NUM_TOKENS)
        self.answers.append(Answer(prompt, tokens, begun_s, time.monotonic()))

    def _hang_up(self, draw: random.Random) -> None:
        request = self._server.request(draw.choice(PROMPTS), 40, streams=True)
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60.0)
        connection.request("POST", request.selector, request.data, dict(request.header_items()))
        response = connection.getresponse()
        for _ in range(draw.randrange(1, 6)):
            assert response.readline(), "the answer has ended already"
        connection.close()
        response.close()
        self.num_hung_up += 1
        self._stop.wait(0.05)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def check(versions: Versions, answers: list[Answer], times: dict[int, tuple[float, float]]) -> None:
    """Each answer is that of one version, and of one that was there when it was computed.

    Args:
        versions: the versions.
        answers: the answers. There must be some of at least two versions.
        times: when the change to a version began, and when it was complete.
    """
    seen = set()
    for each in answers:
        found = versions.of(each.prompt, each.tokens)
        assert found, f"prompt {each.prompt} was answered by no version: {each.tokens}"
        complete = [number for number, (_begun_s, ended_s) in times.items() if ended_s <= each.begun_s]
        begun = [number for number, (begun_s, _ended_s) in times.items() if begun_s <= each.ended_s]
        at_least, at_most = max(complete, default=min(versions.expected)), max(begun, default=min(versions.expected))
        assert any(at_least <= number <= at_most for number in found), f"{found}, not {at_least} to {at_most}"
        seen |= set(found)
    assert len(answers) >= 10
    assert len(seen) > 1, "no version came while requests ran"
