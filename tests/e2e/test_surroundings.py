"""What surrounds a job: the folder, the streams and the signals that it is started with."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest
from tests.support.jobs import IGNORED, IGNORING, SCRIPTS, ignored_by, run, running

TRAIN = """
    import json, os, sys
    from pathlib import Path

    import torch

    import keepstep


    class Ones(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.ones(4)


    if __name__ == "__main__":
        session = keepstep.init(seed=0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.protect(model=model, optimizer=optimizer)
        os.chdir("out")  # as Hydra does
        value = (Path(__file__).parent / "value.txt").read_text()
        import sibling  # for the first time
        loader = torch.utils.data.DataLoader(Ones(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
        for step, batch in session.batches(loader, steps=4):
            with step:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        import random  # the library's
        try:
            import figures
        except ImportError:
            figures = None
        print("saw", json.dumps([value, sibling.VALUE, hasattr(random, "Random"), figures is None]), flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_project_has_modules_in_its_root_that_are_named_like_others(method: str, tmp_path: Path) -> None:
    """And a script that changes its directory; both runs of a drill, with their page, are started there."""
    for name in ("scripts", "out", "figures"):
        (tmp_path / name).mkdir()
    for name in ("random.py", "copy.py", "socket.py", "json.py", "msgspec.py", "figures/__init__.py"):
        (tmp_path / name).write_text("def helper(): return 1\n")
    (tmp_path / "scripts" / "value.txt").write_text("beside it")
    (tmp_path / "scripts" / "sibling.py").write_text("VALUE = 'sibling'")
    (tmp_path / "scripts" / "train.py").write_text(textwrap.dedent(TRAIN))
    flags = ("--nproc-per-node", 1, "--spares", 0, "--faults", "none", "--start-method", method)
    code, out, err = run("drill", *flags, "--dashboard=127.0.0.1:0", "scripts/train.py", cwd=tmp_path)
    assert code == 0, err
    assert out.count('saw ["beside it", "sibling", true, true]') == 2, out
    assert "Traceback" not in err


@pytest.mark.parametrize("flags", [("--tee", 3), ("--start-method", "spawn")], ids=["tee", "spawn"])
def test_a_service_may_start_it_without_any_stream(flags: tuple[object, ...], tmp_path: Path) -> None:
    without = ("/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    report = tmp_path / "report.json"
    code, out, err = run(
        "run", "--nproc-per-node", 2, *flags, "--run-dir", tmp_path / "run", "--report", report, SCRIPTS / "tiny.py",
        prefix=without,
    )  # fmt: skip
    assert (code, out, err) == (0, "", "")
    assert json.loads(report.read_text())["exit_code"] == 0


def test_signals_that_were_ignored_at_the_start_stay_ignored(tmp_path: Path) -> None:
    """`nohup`, then the terminal goes away: its whole process group gets SIGHUP. A drain is still possible."""
    flags = ("--nproc-per-node", 2, "--run-dir", tmp_path / "run", "--dashboard=127.0.0.1:0")
    with running("run", *flags, SCRIPTS / "drained.py", tmp_path, "checkpoint", 100_000, prefix=IGNORING) as job:
        assert job.process.stdout is not None
        assert "trains" in job.process.stdout.readline()
        processes = job.processes()
        # launcher, spawner, sweeper, page, two ranks and a spare
        assert [ignored_by(pid) for pid in processes] == [IGNORED] * 7
        for number in IGNORED:
            for pid in processes:
                os.kill(pid, number)
        job.process.send_signal(signal.SIGTERM)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1
    assert "ended by SIGTERM: drained at step" in err
    assert "recovery" not in err
