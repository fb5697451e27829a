"""``serve_transformers.py``: what a model of Transformers answers while ranks of its training job are killed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tests.support.jobs import DEADLINE_S, EXAMPLES, running

from keepstep.errors import WeightsNotReady
from keepstep.integrations.generation import GenerationEngine

SCRIPT = EXAMPLES / "serve_transformers.py"
STEPS, EVERY = 60, 5
FAULTS = "kill@step=12,phase=backward,rank=0;kill@step=24,phase=synced,rank=1;kill@step=39,phase=updated,rank=0"
OPTIONS = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def answers_until(stop: threading.Event, engine: GenerationEngine) -> list[tuple[int, str]]:
    """The same question all the time."""
    answers = []
    while not stop.is_set():
        try:
            generated = engine.generate(torch.tensor([list(b"def ")]), **OPTIONS)
        except WeightsNotReady:
            stop.wait(0.05)
            continue
        answers.append((generated.version, json.dumps(generated.output[0].tolist())))
        stop.wait(0.02)  # the training needs the cores, too
    return answers


def test_answers_while_ranks_are_killed(tmp_path: Path) -> None:
    """The two runs of a drill come to the same versions, and each of them answers alike whenever it is asked."""
    spec = importlib.util.spec_from_file_location("serve_transformers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder, result = tmp_path / "w", tmp_path / "drill.json"
    flags = ("--json", result, "--nproc-per-node", 2, "--spares", 1, "--faults", FAULTS)
    stop = threading.Event()
    with (
        GenerationEngine(example.build_model(), folder) as engine,
        running("drill", *flags, SCRIPT, "train", folder, "--steps", STEPS) as drill,
        ThreadPoolExecutor(1) as client,
    ):
        asking = client.submit(answers_until, stop, engine)
        try:
            code, out, err = drill.finish()
        finally:
            stop.set()
        told = asking.result(DEADLINE_S)
        assert code == 0, out + err
        assert engine.subscriber.version == STEPS
    assert json.loads(result.read_text())["identical"]
    texts = defaultdict(set)
    for version, text in told:
        texts[version].add(text)
    assert {version: len(each) for version, each in texts.items()} == dict.fromkeys(texts, 1)
    assert set(texts) <= set(range(EVERY, STEPS + 1, EVERY))
    assert len(texts) >= 6
    assert sum(after < before for (before, _), (after, _) in itertools.pairwise(told)) == 1, "two runs"


def test_one_command_trains_and_asks() -> None:
    """As the README has it, shorter."""
    command = [sys.executable, SCRIPT, "--steps", "20"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    versions = [int(number) for number in re.findall(r"^version +(\d+): b'def ", ended.stdout, re.MULTILINE)]
    assert versions == sorted(set(versions)), "a version is asked once, and they come in their order"
    assert versions[-1] == 20
