"""``keepstep run`` as a user meets it: it works, it ends, and what cannot be done is said in one message."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, run, running, status
from tests.support.watching import await_journal

from keepstep.protocol.recovery import RecoverySettings
from keepstep.trace.record import runfolder

TINY = SCRIPTS / "tiny.py"


def sums(output: str) -> set[str]:
    """The sums of parameters that the ranks printed."""
    return {line.rpartition(" ")[2] for line in output.splitlines() if " sum " in line}


def begun(output: str) -> set[str]:
    """The steps that the ranks began at."""
    return {line.split("began at ")[1].split(",")[0] for line in output.splitlines() if " sum " in line}


@pytest.mark.parametrize("method", [[], ["--start-method", "spawn"]])
def test_runs_and_reports(tmp_path: Path, method: list[str]) -> None:
    report = tmp_path / "report.json"
    code, out, err = run("run", "--nproc-per-node", 2, "--report", report, *method, TINY)
    assert code == 0, err
    assert len(sums(out)) == 1
    assert err.splitlines()[-1].endswith(" steps, no rank lost")
    assert "dashboard" not in err, "the run's folder is gone"
    result = json.loads(report.read_text())
    assert (result["exit_code"], result["recoveries"], result["generation"]) == (0, [], 1)


def test_no_process_of_a_job_on_one_node_imports_what_several_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of the packages of the extra `cluster` are modules that note who imports them, and raise."""
    noted = tmp_path / "noted"
    for name in ("grpc", "cryptography"):
        text = f"import sys\nprint({name!r}, sys.argv, file=open({str(noted)!r}, 'a'))\nraise ImportError({name!r})\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    code, _out, err = run("run", "--nproc-per-node", 2, TINY)
    assert code == 0, err
    assert not noted.exists(), noted.read_text()
    assert run("token", "--new")[0] == 1
    assert noted.read_text().startswith("cryptography ")


def test_module_and_tee(tmp_path: Path) -> None:
    (tmp_path / "tiny_module.py").write_text(TINY.read_text())
    logs = tmp_path / "logs"
    code, out, err = run(
        "run", "--nproc-per-node", 2, "--tee", "3", "--log-dir", logs, "-m", "tiny_module", cwd=tmp_path
    )
    assert code == 0, err
    assert any(line.startswith("[default0]:rank 0 of 2") for line in out.splitlines()), out
    assert len(list(logs.rglob("stdout.log"))) >= 2


def test_status_names_every_worker(tmp_path: Path) -> None:
    with running("run", "--nproc-per-node", 2, "--run-dir", tmp_path, "--tee", "1", TINY, "--steps", 100000) as job:
        assert job.process.stdout is not None
        journal = tmp_path / "journal.jsonl"
        await_journal(journal, "WorkerReady", 3)
        found = status(tmp_path)
        job.process.send_signal(signal.SIGTERM)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1
    assert "SIGTERM" in err
    assert sorted(str(worker["rank"]) for worker in found["workers"]) == ["0", "1", "None"]
    assert {worker["role"] for worker in found["workers"]} == {"worker", "spare"}
    for worker in found["workers"]:
        assert {"pid", "node", "rank", "role", "generation", "step", "phase"} <= set(worker)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm"))
    with running("run", "--nproc-per-node", 3, "--run-dir", tmp_path, TINY, "--steps", 1000000) as job:
        await_journal(tmp_path / "journal.jsonl", "WorkerReady", 4)
        job.process.send_signal(number)
        code, _out, _err = job.finish()
        job.wait_until_gone()
    assert code == {signal.SIGTERM: 1, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    left = set(os.listdir("/dev/shm")) - before
    assert {name for name in left if not name.startswith("sem.mp-")} == set()  # those are of tests beside this one


def test_the_spawner_dies(tmp_path: Path) -> None:
    with running("run", "--nproc-per-node", 2, "--run-dir", tmp_path, TINY, "--steps", 1000000) as job:
        await_journal(tmp_path / "journal.jsonl", "WorkerReady", 3)
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in job.processes()}
        (spawner,) = (pid for pid in job.processes() if pid in parents and pid != job.process.pid)
        os.kill(spawner, signal.SIGKILL)
        code, _out, err = job.finish()
        job.wait_until_gone()
    assert code == 1
    assert "the process that starts workers died" in err


def test_all_ranks_lost_without_a_checkpoint() -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, TINY, "--kill-all-at", 7)
    assert code == 75
    assert "no live rank holds the state" in err
    assert "checkpoint_dir" in err


def test_all_ranks_lost_with_a_checkpoint(tmp_path: Path) -> None:
    whole = run("run", "--nproc-per-node", 2, TINY, "--steps", 30)
    code, out, err = run(
        "run", "--nproc-per-node", 2, TINY, "--steps", 30, "--kill-all-at", 17, "--checkpoint-dir", tmp_path / "saved"
    )
    assert code == 0, err
    assert begun(out) <= {"5", "10", "15"}
    assert sums(out) == sums(whole[1])


def test_a_job_started_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    arguments = ("run", "--nproc-per-node", 2, TINY, "--checkpoint-dir", tmp_path / "saved")
    assert run(*arguments, "--steps", 13)[0] == 0
    code, out, err = run(*arguments, "--steps", 30)
    assert code == 0, err
    assert begun(out) <= {"5", "10"}
    assert sums(out) == sums(run("run", "--nproc-per-node", 2, TINY, "--steps", 30)[1])


def test_the_end_of_a_job_says_what_it_did_and_how_to_look_at_it(tmp_path: Path) -> None:
    body = (
        "import os, signal\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "session.protect(model=model, optimizer=optimizer)\n"
        "for step in session.steps(20):\n    if step == 9: break\n    with step:\n        optimizer.zero_grad()\n"
        "        model(torch.ones(2)).sum().backward()\n"
        "        if step == 5 and session.rank == 1 and session.generation == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        optimizer.step()\n"
    )
    path, folder = script(tmp_path, body), tmp_path / "a run"
    code, _out, err = run("run", "--nproc-per-node", 2, "--run-dir", folder, path)
    assert code == 0, err
    looking, closing = err.splitlines()[-2:]
    assert looking == f"keepstep: to look at this run: keepstep dashboard '{folder}'"
    assert re.fullmatch(r"keepstep: 9 steps, 1 rank lost, recovered in \d+\.\d s", closing), err


def test_too_few_ranks(tmp_path: Path) -> None:
    code, _out, err = run(
        "run", "--nproc-per-node", 2, "--spares", 0, "--max-restarts", 0, TINY, "--kill-at", 5, cwd=tmp_path
    )
    assert code == 76
    assert "--max-restarts" in err
    (saved,) = tmp_path.glob("keepstep-rescue-step*")
    assert (saved / ".metadata").exists()
    assert str(saved) in err


def test_a_step_that_always_fails_ends_the_job(tmp_path: Path) -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, TINY, "--kill-at", 5, cwd=tmp_path)
    assert code == 76
    assert "without a completed step" in err


def test_failure_after_the_last_step() -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, TINY, "--fail-after-steps")
    assert code == 1
    assert "after the last step" in err


def test_leaving_the_loop_early() -> None:
    code, out, err = run("run", "--nproc-per-node", 2, TINY, "--stop-early-at", 5)
    assert code == 0, err
    assert len(sums(out)) == 1


def test_an_interruption_that_leaves_its_step(tmp_path: Path) -> None:
    """A framework enters the step in one callback and leaves it in another: there is no ``with`` to end at."""
    body = (
        "import os, signal\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "session.protect(model=model, optimizer=optimizer)\n"
        "for step in session.steps(20):\n"
        "    step.__enter__()\n"
        "    if step.index == 5 and session.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    step.__exit__(None, None, None)\n"
    )
    code, _out, err = run("run", "--nproc-per-node", 3, script(tmp_path, body))
    assert code == 1
    assert "the interruption left the script instead of ending at its 'with step:'" in err.splitlines()[-1], err


def test_a_script_that_begins_at_a_step_of_its_own(tmp_path: Path) -> None:
    """It has a checkpoint of its own; its replacement begins where the job stands."""
    body = (
        "import os, signal\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "session.protect(model=model, optimizer=optimizer)\n"
        "for step in session.steps(9, start=5):\n"
        "    with step:\n"
        "        if step.index == 7 and session.generation == 1 and session.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        print(f'rank {session.rank} step {step.index}', flush=True)\n"
    )
    code, out, err = run("run", "--nproc-per-node", 2, script(tmp_path, body))
    assert code == 0, err
    for rank in (0, 1):
        assert [line for line in out.splitlines() if f"rank {rank}" in line] == [
            f"rank {rank} step {index}" for index in (5, 6, 7, 8)
        ]


def loses_a_reduced_loss(tmp_path: Path, use: str) -> tuple[int, str, str]:
    """A job in which rank 1 dies when both ranks are through their updates of step 5, before it reduces its loss."""
    body = (
        "import os, signal\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        "session.protect(model=model, optimizer=optimizer, plateau=plateau)\n"
        "for step in session.steps(10):\n"
        "    with step:\n"
        "        loss = model(torch.ones(1, 2)).sum()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        loss = loss.detach()\n"
        "        torch.distributed.barrier()\n"
        "        if step.index == 5 and session.generation == 1 and session.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        torch.distributed.all_reduce(loss)\n"
        f"        {use}\n"
    )
    return run("run", "--nproc-per-node", 2, script(tmp_path, body), cwd=tmp_path)


def test_a_value_that_is_lost_after_the_update_is_not_printed_as_if_it_were_true(tmp_path: Path) -> None:
    code, out, err = loses_a_reduced_loss(tmp_path, "print(step.index, f'{loss.item() / 2:.3f}', flush=True)")
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("5 ")] == ["5 missing"]
    assert "what it would have given is missing, at" in err


def test_a_copy_that_was_decided_by_a_lost_value_does_not_count(tmp_path: Path) -> None:
    """The other rank is gone, so there is no whole copy left."""
    code, _out, err = loses_a_reduced_loss(tmp_path, "plateau.step(loss.item())")
    assert code == 76
    where = re.escape(str(tmp_path / "script.py")) + r":\d+: plateau\.step\(loss\.item\(\)\)"
    assert re.search(f"may have got into what the script has decided by it, at {where}", err), err
    [saved] = tmp_path.glob("keepstep-rescue-*")
    assert re.fullmatch(r"keepstep-rescue-step6-rank0-\w+-in-doubt", saved.name)


def test_a_state_that_is_saved_in_the_temporary_run_folder_is_not_removed_with_it(tmp_path: Path) -> None:
    body = (
        "import os, signal, tempfile\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "session.protect(model=model, optimizer=optimizer)\n"
        "gone = tempfile.mkdtemp()\n"
        "os.chdir(gone)\n"
        "os.rmdir(gone)\n"
        "for step in session.steps(10):\n"
        "    with step:\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "    if step.index == 5 and session.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = ("run", "--nproc-per-node", 2, "--spares", 0, "--max-restarts", 0, script(tmp_path, body))
    code, _out, err = run(*job)
    assert code == 76, err
    assert "keepstep: the working directory is not writable" in err
    found = re.search(r"state saved: (\S+)", err)
    assert found, err
    saved = Path(found[1])
    assert saved.name.startswith("keepstep-rescue-step6-rank0-")
    assert (saved / "content.msgpack").exists()
    shutil.rmtree(saved.parent)


def script(tmp_path: Path, body: str) -> Path:
    """A script with a model, an optimizer and ``body``."""
    path = tmp_path / "script.py"
    head = (
        "import torch, keepstep\n"
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "session = keepstep.init()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    path.write_text(head + body)
    return path


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("for step in session.steps(3): pass", "steps() before protect()"),
        ("session.protect(model=model, optimizer=optimizer)\noptimizer.step()", "outside of a step"),
        ("session.protect(model=model, thing=object())", "thing=object"),
        (
            "class Average(torch.optim.SGD):\n"
            "    def step(self, closure=None):\n"
            "        for parameter in self.param_groups[0]['params']: torch.distributed.all_reduce(parameter.data)\n"
            "        return super().step()\n"
            "optimizer = Average(model.parameters(), lr=0.1)\n"
            "session.protect(model=model, optimizer=optimizer)\n"
            "for step in session.steps(3):\n    with step: optimizer.step()",
            "Average.step() runs collectives",
        ),
        (
            "DDP = torch.nn.parallel.DistributedDataParallel\n"
            "model, other = DDP(model), DDP(torch.nn.Linear(2, 2))\n"
            "second = torch.optim.Adam(other.parameters())\n"
            "session.protect(model=model, other=other, optimizer=optimizer, second=second)\n"
            "for step in session.steps(3):\n"
            "    with step:\n"
            "        model(torch.ones(1, 2)).sum().backward()\n"
            "        optimizer.step()\n"
            "        other(model(torch.ones(1, 2))).sum().backward()\n"
            "        second.step()",
            "step 0: Adam.step() takes gradients that a backward after another optimizer.step() has reduced",
        ),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel\n"
            "session.protect(model=FullyShardedDataParallel(model, device_id=torch.device('cpu')))",
            "is a FullyShardedDataParallel (FSDP1), whose ranks hold runs of flattened tensors",
        ),
        ("session.protect(optimizer=optimizer)", "no torch.nn.Module"),
        ("session.protect(model=model, o=torch.optim.LBFGS(model.parameters()))", "closure"),
        (
            "o = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)\n"
            "session.protect(model=model, o=o, snapshot_every='off')\n"
            "for step in session.steps(3):\n"
            "    with step: o.step()",
            "ZeroRedundancyOptimizer.step() runs collectives",
        ),
        (
            "session.protect(model=model, optimizer=optimizer)\n"
            "for step in session.steps(3):\n"
            "    with step: optimizer.step(lambda: 0.0)",
            "closure",
        ),
        (
            "session.protect(model=model)\nfor step in session.steps(3):\n    with step: optimizer.step()",
            "not protected",
        ),
        ("session.protect(model=model)\nfor step in session.steps(3): pass", "not entered"),
        (
            "model = torch.nn.Linear(2, 2 + session.rank)\n"
            "session.protect(model=model)\n"
            "for step in session.steps(3):\n    with step: pass",
            "replicas must be equal",
        ),
        (
            "session.protect(model=model)\nfor step in session.steps(3, start=session.rank):\n    with step: pass",
            "the host value steps(start=...) differs between rank 1 and rank 0",
        ),
        ("session.protect(model=model)\nsession.steps(3, start=4)", "steps(start=4): allowed are 0 to 3"),
        (
            "with torch.no_grad(): model.bias += session.rank\n"
            "session.protect(model=model, optimizer=optimizer)\n"
            "for step in session.steps(3):\n    with step: pass",
            "'model.bias' differs between rank 1 and rank 0 before the first step",
        ),
        ("raise RuntimeError('of the script itself')", "of the script itself"),
    ],
)
def test_scripts_that_cannot_work(tmp_path: Path, body: str, message: str) -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, "--spares", 0, script(tmp_path, body))
    assert code == 1
    assert message in err.splitlines()[-1], err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spares", "-1", TINY], "--spares -1"),
        (["--nproc-per-node", "0", TINY], "--nproc-per-node 0"),
        (["--nproc-per-node", "many", TINY], "--nproc-per-node many"),
        (["--nproc-per-node", "1000000", TINY], "at most"),
        (["--nnodes", "2", TINY], "--nnodes 2: set their rendezvous with --rdzv-endpoint"),
        (["--max-restarts", "-2", TINY], "--max-restarts -2"),
        (["--hang-after", "0", TINY], "--hang-after"),
        (["no-such-script.py"], "no-such-script.py"),
        (["--run-dir", "/proc/nowhere", TINY], "/proc/nowhere"),
    ],
)
def test_flags_that_cannot_work(arguments: list[str], message: str) -> None:
    code, _out, err = run("run", *arguments)
    assert code == 2
    assert message in err.splitlines()[-1]


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _out, err = run("run", "--master-port", port, TINY)
    assert code == 2
    assert f"--master-port {port}" in err


@pytest.mark.parametrize("faults", ["kill@step=1,phase=sideways", "explode@step=1,phase=forward", "kill@step=x", ""])
def test_faults_that_do_not_parse(faults: str) -> None:
    code, _out, err = run("drill", "--faults", faults, TINY)
    assert code == 2
    assert "allowed are" in err or "for example" in err or "is not a number" in err


def test_status_of_no_job(tmp_path: Path) -> None:
    runfolder.begin(tmp_path, runfolder.new_run(("train.py",), "node", RecoverySettings(world_size=1, num_spares=0)))
    code, _out, err = run("status", tmp_path)
    assert (code, err) == (2, f"keepstep status: {tmp_path}: no job is running there\n")


@pytest.mark.parametrize("view", ["status", "top", "report", "dashboard"])
def test_views_of_no_run(view: str, tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    code, _out, err = run(view, folder)
    assert (code, err) == (2, f"keepstep {view}: {folder}: no run is recorded there (no run.json)\n")


def test_lines_of_several_ranks_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python is told not to buffer, it writes each argument of a print() by itself."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    body = (
        "session.protect(model=model, optimizer=optimizer)\n"
        "for step in session.steps(1):\n    with step:\n        model(torch.ones(2)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    body += "for number in range(300):\n    print('line', number, 'of', 'rank', session.rank, 'ends', 'here')\n"
    code, out, err = run("run", "--nproc-per-node", 3, "--spares", 0, script(tmp_path, body))
    assert code == 0, err
    lines = [line for line in out.splitlines() if "line" in line or "here" in line]
    assert len(lines) == 900
    assert all(re.fullmatch(r"line \d+ of rank \d ends here", line) for line in lines)
