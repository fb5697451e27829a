"""Torch's own tests of process groups pass on keepstep's where they pass on plain gloo, but for a written list."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.worker.ranks import run_ranks
from tests.worker.upstream.suite import SIZE, run_tests

QUICK = (
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_destroy_full_group",
    "test_gather",
    "test_get_backend",
    "test_send_recv_any_source",
)
"""A few of each kind, for every run of the tests."""

EXCEPTIONS: dict[str, str] = {
    "test_ddp_logging_data_cpu": "DDP logs the name of the backend's class, which is keepstep's",
}
"""Tests that pass on plain gloo and not here, with the reason."""


def kind(outcomes: list[str]) -> str:
    kinds = {outcome.partition(":")[0] for outcome in outcomes}
    return "failed" if "failed" in kinds else "passed" if "passed" in kinds else "skipped"


def test_a_few_of_torchs_own_tests_pass(tmp_path: Path) -> None:
    for answer in run_ranks(SIZE, run_tests, tmp_path, "keepstep", list(QUICK)):
        assert answer == dict.fromkeys(QUICK, "passed")


def outcomes_on(backend: str) -> dict[str, str]:
    found = subprocess.run(
        [sys.executable, "-m", "tests.worker.upstream.run", backend],
        stdout=subprocess.PIPE,
        text=True,
        timeout=1500,
        check=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    return {name: kind(outcomes) for name, outcomes in map(json.loads, found.stdout.splitlines())}


@pytest.mark.full
def test_what_passes_on_gloo_passes_here_but_for_the_list() -> None:
    gloo, keepstep = outcomes_on("gloo"), outcomes_on("keepstep")
    assert len(gloo) > 200
    assert EXCEPTIONS.keys() <= gloo.keys()
    missing = {name for name, outcome in gloo.items() if outcome == "passed" and keepstep[name] != "passed"}
    assert missing == EXCEPTIONS.keys()
