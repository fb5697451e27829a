"""What records a job never ends it: a run folder that is full, or gone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from tests.e2e.test_drain import SCRIPT, await_line
from tests.support.jobs import running

from keepstep.shared.tagpage import PAGE_BYTES

SAID = "keepstep: the run is no longer recorded, training continues: [Errno 27] File too large"


@pytest.mark.parametrize("what", ["full", "gone"])
def test_a_rank_is_replaced_though_nothing_can_be_recorded(what: str, tmp_path: Path) -> None:
    report, run_dir = tmp_path / "report.json", tmp_path / "run"
    flags = ("--nproc-per-node", 2, "--spares", 1, "--run-dir", run_dir, "--report", report)
    with running("run", *flags, SCRIPT, tmp_path, "tells", 600) as job:
        victim = int(await_line(job, "trains as").split()[-1])
        if what == "full":
            os.truncate(run_dir / "journal.jsonl", PAGE_BYTES)  # the least that an agent must be able to write
            resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (PAGE_BYTES, resource.RLIM_INFINITY))
        else:
            shutil.rmtree(run_dir)
        psutil.Process(victim).send_signal(signal.SIGKILL)
        await_line(job, "goes on")
        if what == "full":
            resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 0, err
    assert "rank 1 lost: killed by SIGKILL" in err
    assert (SAID in err) is (what == "full")
    assert json.loads(report.read_bytes())["exit_code"] == 0
