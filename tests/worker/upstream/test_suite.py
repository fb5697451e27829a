"""Torch's own tests of process groups pass on keepstep's, except for a written list: `exceptions.toml`."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.worker.ranks import run_ranks
from tests.worker.upstream.suite import SIZE, outcomes_in, run_tests

QUICK = (
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_destroy_full_group",
    "test_gather",
    "test_get_backend",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source",
)
"""A few of each kind, for every run of the tests."""

HERE = Path(__file__).parent


GROUPS = tomllib.loads((HERE / "exceptions.toml").read_text(encoding="utf-8"))
SKIPPED = {name: group["reason"] for group in GROUPS["skipped"] for name in group["tests"]}
FAILED = {name for group in GROUPS["failed"] for name in group["tests"]}
PASS_ON_GLOO = {name for group in GROUPS["failed"] if group.get("passes_on_gloo") for name in group["tests"]}


def test_a_few_of_torchs_own_tests_pass(tmp_path: Path) -> None:
    run_ranks(SIZE, run_tests, tmp_path, "keepstep", list(QUICK))
    assert outcomes_in(tmp_path, SIZE) == dict.fromkeys(QUICK, "passed")


def outcomes_on(backend: str) -> dict[str, tuple[str, str]]:
    found = subprocess.run(
        [sys.executable, "-m", "tests.worker.upstream.run", backend],
        stdout=subprocess.PIPE,
        text=True,
        timeout=1500,
        check=True,
        cwd=HERE.parents[2],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[2])},
    )
    outcomes = {}
    for name, outcome in map(json.loads, found.stdout.splitlines()):
        kind, _colon, reason = outcome.partition(": ")
        outcomes[name] = (kind, reason.replace("accelerator", "CUDA"))  # how torch 2.15 says it, and how 2.13 does
    return outcomes


def test_torchs_own_tests_pass_here_but_for_the_list() -> None:
    gloo, keepstep = outcomes_on("gloo"), outcomes_on("keepstep")
    assert gloo.keys() == keepstep.keys()
    assert len(gloo) > 200
    assert {name: reason for name, (kind, reason) in keepstep.items() if kind == "skipped"} == SKIPPED
    failed = {name: reason for name, (kind, reason) in keepstep.items() if kind == "failed"}
    assert failed.keys() == FAILED, {name: reason for name, reason in failed.items() if name not in FAILED}
    assert {name for name in SKIPPED.keys() | FAILED if gloo[name][0] == "passed"} == PASS_ON_GLOO


def test_every_exception_has_one_reason() -> None:
    names = [name for groups in GROUPS.values() for group in groups for name in group["tests"]]
    assert len(names) == len(set(names))
    assert all(group["reason"] and group["tests"] for groups in GROUPS.values() for group in groups)
