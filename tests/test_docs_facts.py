"""Numbers, names and tables of README.md and docs/ against what they are taken from. `test_docs.py` runs the pages."""

import ast
import re
import sys
import tomllib
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

import pytest
from tests.protocol import test_lease
from tests.sim import test_mutants
from tests.support import layouts, loops
from tests.test_docs import DEPLOY, FENCE, PAGES, PROTOCOL, ROOT, SIMULATION, USAGE, section

from keepstep.cli.cluster import controller
from keepstep.controller import jobstore
from keepstep.dashboard import process
from keepstep.launcher import console, flags
from keepstep.launcher.cluster import service
from keepstep.launcher.cluster.flags import DEFAULT_PORT
from keepstep.protocol import clocks, lease, reliable_channel
from keepstep.protocol import controller as controller_machine
from keepstep.protocol.deadlines import DEADLINES, LEASE_S
from keepstep.protocol.messages import base, reports
from keepstep.protocol.node import agent as agent_machine
from keepstep.protocol.node import liveness
from keepstep.protocol.recovery import GRACE_S, RecoverySettings
from keepstep.protocol.recovery.scripts import startup as record
from keepstep.protocol.recovery.settings import QUARANTINE_FAILURES, QUARANTINE_WINDOW_S
from keepstep.shared import tagpage
from keepstep.sim.oracle import Check
from keepstep.trace.record import phaselog, runfolder
from keepstep.trace.timeline import events, stragglers
from keepstep.transports import codec
from keepstep.transports.rpc import server
from keepstep.weights import publisher, subscriber
from keepstep.weights.device import stages, verdicts
from keepstep.weights.remote import feeder
from keepstep.worker import coordination
from keepstep.worker.groups import communicators
from keepstep.worker.groups import startup_operations as startup
from keepstep.worker.state import checkpoint, restore
from keepstep.worker.step import stop_points
from keepstep.worker.values import declared, rank_objects

README, SECURITY, ARCHITECTURE = ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "docs" / "ARCHITECTURE.md"
OBSERVE, WEIGHTS, CONTRIBUTING = ROOT / "docs" / "observe.md", ROOT / "docs" / "WEIGHTS.md", ROOT / "CONTRIBUTING.md"
TEXTS = [*PAGES, CONTRIBUTING, ROOT / "CHANGELOG.md"]
WIDTH = 125
"""Characters in a line of text. Tables, pictures, and what is shown as it was printed may be wider."""


def mib(num_bytes: int) -> str:
    assert num_bytes % (1 << 20) == 0
    return f"{num_bytes >> 20} MiB"


# ---- numbers --------------------------------------------------------------------------------------------------------

RECOVERY = RecoverySettings(1, 0)
HANG = f"max({DEADLINES.hang_after_s:g} s, {DEADLINES.hang_factor:g}"
FACTS: list[tuple[Path, str]] = [
    (README, f"{HANG} × the longest recent phase of its own process)"),
    (USAGE, f"{HANG} × the longest recent phase of its own process)"),
    (USAGE, f"a spare takes the rank, at most {DEADLINES.together_s:g} s later"),
    (USAGE, f"| `--hang-after SECONDS[:FACTOR]` | {DEADLINES.hang_after_s:g}:{DEADLINES.hang_factor:g} |"),
    (README, f"more than {RECOVERY.max_recoveries_without_progress} failures without a completed step"),
    (README, f"no heartbeat for {LEASE_S:g} s"),
    (USAGE, f"up to {mib(startup.MAX_RESULT_BYTES)} each: {mib(startup.MAX_VALUE_BYTES)} of what is the same"),
    (USAGE, f"{mib(startup.MAX_VALUE_BYTES)} of what each of its ranks has for itself"),
    (USAGE, f"and {mib(record.MAX_KEPT_BYTES)} of the whole job"),
    (USAGE, f"All keys and values take at most {mib(jobstore.MAX_STORE_BYTES)}"),
    (USAGE, f"a rank may have {declared.MAX_RANK_BYTES >> 10} KiB of them, and all ranks together"),
    (USAGE, f"together {mib(declared.MAX_TABLE_BYTES)}. A checkpoint holds"),
    (USAGE, f"the objects of all ranks together {mib(rank_objects.MAX_BYTES)}"),
    (USAGE, f"no failure is known within {communicators.DETECTION_S:g} s"),
    (USAGE, f"when no rank has called `init()` for {console.UNPROTECTED_S:g} s"),
    (USAGE, f"killed: {GRACE_S:g} by default"),
    (USAGE, f"Default: {flags.LOOPBACK} and a free port"),
    (USAGE, f"| `--dashboard[=HOST:PORT]` | {process.DEFAULT}, or any free port |"),
    (USAGE, f"the host of `--rdzv-endpoint` and {flags.MASTER_PORT} |"),
    (PROTOCOL, f"({coordination.SETTLE_S * 1000:g} ms at most) before anything is broken"),
    (PROTOCOL, f"for {agent_machine.HOLD_S * 1000:g} ms at most, and sends equal ones as one"),
    (PROTOCOL, f"(up to {stop_points.NUM_STOP_POINTS} each way through the model, and"),
    (PROTOCOL, f"More than {RECOVERY.max_recoveries_without_progress} failures without one completed step"),
    (PROTOCOL, f"they wait another {RECOVERY.spares_grace_s:g} s"),
    (PROTOCOL, f"when a packet that comes {reliable_channel.CROSSING_S:g} s later does not acknowledge it"),
    (PROTOCOL, f"does not acknowledge it, or after {reliable_channel.RESEND_S:g} s"),
    (PROTOCOL, f"A node has a lease of {LEASE_S:g} s"),
    (PROTOCOL, f"It gives no node up for {DEADLINES.isolated_s:g} s"),
    (PROTOCOL, f"for which it holds, {lease.HOLD_S:g} s by default"),
    (PROTOCOL, f"*began* less than {lease.TRUSTED:g} of that time ago"),
    (PROTOCOL, f"take {mib(jobstore.MAX_STORE_BYTES)}, a value {mib(reports.MAX_STORE_VALUE_BYTES)}"),
    (PROTOCOL, f"({mib(startup.MAX_RESULT_BYTES)} each, {mib(startup.MAX_VALUE_BYTES)} of a rank)"),
    (PROTOCOL, f"cut into buckets of at most {mib(restore.RESTORE_BUCKET_BYTES)}"),
    (PROTOCOL, f"`--grace` seconds ({GRACE_S:g} by default)"),
    (PROTOCOL, f"the longest of the last {liveness.WINDOW} such phases of this process"),
    (PROTOCOL, f"first phase of that kind in this job); {DEADLINES.long_s:,.0f} s before the job has had one"),
    (PROTOCOL, f"| {DEADLINES.recovery_s:g} s; each bucket of a transfer counts as a move"),
    (PROTOCOL, f"(SIGSTOP) | {DEADLINES.hang_after_s:g} s from when it was seen"),
    (PROTOCOL, f"The controller judges a suspicion {DEADLINES.together_s:g} s after it came"),
    (PROTOCOL, f"the node has {DEADLINES.isolated_s:g} s, and if nothing is left, {DEADLINES.long_s:,.0f} s"),
    (PROTOCOL, f"{declared.MAX_RANK_BYTES >> 10} KiB for each rank, {mib(declared.MAX_TABLE_BYTES)} in all"),
    (ARCHITECTURE, f"unknown fields and frames above {mib(codec.MAX_MESSAGE_BYTES)} are refused"),
    (ARCHITECTURE, f"and its last {tagpage.RING_EVENTS - 1:,} phases"),
    (ARCHITECTURE, f"about {round(tagpage.PAGE_BYTES / 10240) * 10} KiB, written by the worker only"),
    (ARCHITECTURE, f"in a file by `controller/startup.py`, at most {mib(record.MAX_KEPT_BYTES)}"),
    (ARCHITECTURE, f"`controller/jobstore.py`, at most {mib(jobstore.MAX_STORE_BYTES)}"),
    (ARCHITECTURE, f"of two buckets ({mib(restore.NUM_SLOTS * restore.RESTORE_BUCKET_BYTES)})"),
    (ARCHITECTURE, f"the buffer is one of {mib(restore.NUM_SLOTS * restore.GPU_BUCKET_BYTES)} there"),
    (USAGE, f"A transfer takes at most {mib(restore.GPU_PEAK_BYTES)} of a GPU's memory in each process"),
    (USAGE, f"of which {mib(2 * restore.GPU_BUCKET_BYTES)} are kept"),
    (SECURITY, f"frames above {mib(codec.MAX_MESSAGE_BYTES)} are refused"),
    (SECURITY, f"At most {server.MAX_STRANGERS:,} connections may be open without having shown a token"),
    (SECURITY, f"There is room for {server.MAX_CONNECTIONS:,} connections of agents besides"),
    (SECURITY, f"{base.MAX_NAME} characters for the name of a node"),
    (SECURITY, f"{base.MAX_TEXT:,} for a reason or an error, {base.MAX_TRACEBACK:,} for a traceback"),
    (SECURITY, f"{base.MAX_DEVICES:,} for a list of devices, and {base.MAX_LISTED:,} for other lists"),
    (SECURITY, f"{feeder.MAX_GREETINGS} callers may be authenticating at a time"),
    (SECURITY, f"{service.MAX_REFUSALS} of them in ten seconds at most"),
    (DEPLOY, f"given up when nothing was heard of it for `--lease` ({LEASE_S:g} s)"),
    (DEPLOY, f"after `--grace` ({GRACE_S:g} s) it leaves in any case"),
    (DEPLOY, f"`--quarantine {QUARANTINE_FAILURES}:{QUARANTINE_WINDOW_S:g}`"),
    (DEPLOY, f"or {RECOVERY.spares_grace_s:g} s later"),
    (DEPLOY, f"node-0.cluster:{DEFAULT_PORT}"),
    (OBSERVE, f"{tagpage.EVENT_BYTES} bytes each"),
    (OBSERVE, f"at most {mib(phaselog.MAX_SEGMENTS * phaselog.SEGMENT_BYTES)}, of which those around recoveries"),
    (OBSERVE, f"over its last {stragglers.WINDOW} steps"),
    (WEIGHTS, f"blocks of tensors, {mib(publisher.DEFAULT_BUCKET_BYTES)} at most by default"),
    (WEIGHTS, f"({stages.DEVICE_PATIENCE_S:g} s a source for a slot, {stages.SOURCE_PATIENCE_S:g} s a device for its"),
    (WEIGHTS, f"{verdicts.COORDINATOR_PATIENCE_S:g} s the coordinator for a device"),
    (WEIGHTS, f"{verdicts.DEVICE_PATIENCE_S:g} s a device for the coordinator"),
    (WEIGHTS, f"{subscriber.CONSUMER_PATIENCE_S:g} s a consumer for its device"),
]  # fmt: skip
"""What a page says, with the numbers of the code in it."""


def flat(page: Path) -> str:
    """A page without its line breaks."""
    return " ".join(page.read_text("utf-8").split())


@pytest.mark.parametrize("page", sorted({page for page, _ in FACTS}), ids=lambda page: page.name)
def test_numbers_are_those_of_the_code(page: Path) -> None:
    text = flat(page)
    assert [fact for at, fact in FACTS if at == page and fact not in text] == []


def test_numbers_in_words_are_those_of_the_code() -> None:
    assert (server.ADMISSION_S, service.REFUSALS_S) == (10.0, 10.0)
    assert "whose handshake is not over within ten seconds, or that have had no call for ten seconds" in flat(SECURITY)
    assert (DEADLINES.start_s, DEADLINES.blind_s, checkpoint._KEPT) == (1800.0, 0.5, 2)
    assert "half an hour from the first `keepstep.init()`" in flat(USAGE)
    assert "the others wait for half an hour for one that joins" in flat(DEPLOY)
    assert "the two newest are kept" in flat(USAGE)
    assert (clocks.ASK_EVERY_S, clocks.SAMPLES) == (5.0, 8)
    assert "every five seconds and takes the quickest of the last eight answers" in flat(OBSERVE)
    assert lease.RENEWALS == 5
    assert "renews it five times in the time for which it holds" in flat(PROTOCOL)
    assert "did not look at its workers for more than half a second" in flat(PROTOCOL)
    assert len(controller_machine.Event.__args__) == 9
    assert "Nine events change the controller's decisions" in flat(PROTOCOL)


LAYOUTS_OF = {
    "DDP": "DDP",
    "other replicated state": "TP × DP 2 × 2, gradients averaged by the script",
    "`ZeroRedundancyOptimizer`": "`ZeroRedundancyOptimizer`",
    "FSDP2": "FSDP2",
    "HSDP": "HSDP",
    "tensor": "TP",
    "pipeline": "pipeline",
}
"""README's word for a layout, and the beginning of the names of its drills."""
LOOPS_OF = {
    "Hugging Face's Trainer": "hf_trainer",
    "Accelerate": "cv_accelerate",
    "Lightning": "lightning_auto",
    "Fabric": "fabric",
    "torchtitan": "torchtitan_llama",
}
"""README's word for a framework, and the example whose drill has its loop."""


def test_what_is_covered_is_what_the_tests_run() -> None:
    [row] = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| covered |")]
    [named] = re.findall(r"; (DDP and .*) parallelism\]", row)
    assert re.split(r", \[?| and ", named) == list(LAYOUTS_OF)
    assert all(any(name.startswith(begin) for name in layouts.LAYOUTS) for begin in LAYOUTS_OF.values())
    [named] = re.findall(r"\[that of\]\(.*?\) (.*?);", row)
    assert re.split(r", | or ", named) == list(LOOPS_OF)
    drills = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "chaos").glob("test_*.py"))
    assert all(example in loops.FILES or f'"{example}.py"' in drills for example in LOOPS_OF.values())


def test_releases_that_are_covered_are_those_of_the_tests() -> None:
    [row] = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| covered |")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [(lowest, above)] = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(project["dependencies"]))
    newest = f"2.{int(above) - 1}"
    assert f"; torch 2.{lowest} to {newest}, Linux, Python {project['requires-python'].strip('>=')} or newer |" in row
    assert f"torch=={newest}.*" in project["optional-dependencies"]["dev"], "make test, make test-full, CI"
    assert f"\nTORCH ?= 2.{lowest}.0\n" in (ROOT / "Makefile").read_text(encoding="utf-8"), "make test-torch"


OF_EXTRAS = (
    "integrations/",
    "dashboard/",
    "transports/rpc/",
    "trust/certificates.py",
    "worker/loop/late_rank.py",
    "worker/loop/wrapped.py",
    "engines/load.py",
    "engines/sglang.py",
)
"""Where the package imports what only an extra or the user's script brings."""


def test_dependencies_are_those_that_the_readme_names_and_the_package_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    [named] = re.findall(
        r"^keepstep needs (.*?)\. Everything else is in extras", README.read_text("utf-8"), re.MULTILINE
    )
    assert {each.lower() for each in re.split(r", | and ", named)} == dependencies
    package = ROOT / "src" / "keepstep"
    imported: set[str] = set()
    for path in package.rglob("*.py"):
        if not path.relative_to(package).as_posix().startswith(OF_EXTRAS):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {each.name.partition(".")[0] for each in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add(str(node.module).partition(".")[0])
    of_scripts = {"tensorboard"}  # a drill reads what a script has written with it
    assert imported - sys.stdlib_module_names - {"keepstep"} - of_scripts == dependencies


def test_mutants_are_counted() -> None:
    assert f"has fired for one of the {len(test_mutants.MUTANTS)}." in flat(SIMULATION)
    assert len(test_mutants.CASES) == 44
    assert "Forty-four mutants need what hardly any seed has" in flat(SIMULATION)
    assert [*test_mutants.MUTANTS.values()].count(Check.GROUPS) == 11
    assert "Eleven mutants are found: among them claims that are compared without the generation" in flat(PROTOCOL)
    devices = [plant for plant, check in test_mutants.MUTANTS.items() if check is Check.DEVICE]
    assert len(devices) == 7
    assert "each with its rank takes a device that is free and well. Seven mutants are found." in flat(PROTOCOL)
    kept = [plant for plant, check in test_mutants.MUTANTS.items() if check is Check.LAST_COPY]
    assert len(kept) == 5
    assert "that was shorter than the deadline; five mutants are found for the first." in flat(PROTOCOL)
    drains = [plant for plant in test_mutants.MUTANTS if "drain" in plant.__name__]
    assert len(drains) == 7
    assert "nor a job that has completed fail. Seven mutants are found." in flat(PROTOCOL)
    (mark,) = (mark for mark in test_lease.test_a_controller_that_breaks_a_rule_is_found_out.pytestmark)
    assert len(mark.args[1]) == 6
    assert "Six mutants, each with one rule broken, are found." in flat(PROTOCOL)


# ---- flags ----------------------------------------------------------------------------------------------------------

ROW = re.compile(r"^\| `(--[a-z-]+)[^`]*` \|([^|\n]*)\|[^\n]+\|$", re.MULTILINE)
"""Of a table with three columns: a flag, its default, and what it does."""


@pytest.mark.parametrize(
    ("page", "heading", "parsers"),
    [
        (USAGE, "keepstep run", [flags.make_parser("keepstep run")]),
        (DEPLOY, "Flags", [flags.make_parser("keepstep run"), controller._parser()]),
    ],
    ids=["run", "nodes"],
)
def test_defaults_are_those_of_the_parsers(page: Path, heading: str, parsers: list[ArgumentParser]) -> None:
    known = {option: action for parser in parsers for action in parser._actions for option in action.option_strings}
    wrong = []
    for flag, cell in ROW.findall(section(page, heading)):
        told = cell.strip()
        default = known[flag].default if flag in known else None
        if isinstance(default, bool) or default in (None, "", [], SUPPRESS):
            is_right = re.fullmatch(r"[\d.:]+", told) is None
        else:
            is_right = told == (f"{default:g}" if isinstance(default, float) else str(default))
        if not is_right:
            wrong.append(f"{flag}: {told!r}, and the parser has {default!r}")
    assert wrong == []


def test_flags_of_the_controller_are_all_described() -> None:
    described = section(DEPLOY, "Flags")
    own = [action for action in controller._parser()._actions if action.help != SUPPRESS and action.dest != "help"]
    assert [action.option_strings for action in own if f"`{action.option_strings[0]}" not in described] == []


def test_flags_of_torchrun_that_are_refused_are_named() -> None:
    (row,) = (line for line in section(USAGE, "keepstep run").splitlines() if "not supported yet" in line)
    assert re.findall(r"`(--[a-z-]+)`", row) == [f"--{name.replace('_', '-')}" for name in flags.NOT_DONE_YET]


# ---- names ----------------------------------------------------------------------------------------------------------


def test_metrics_are_all_described() -> None:
    files = (ROOT / "src/keepstep/dashboard").glob("*metrics.py")
    source = "".join(path.read_text("utf-8") for path in files)
    exposed = set(re.findall(r'"(keepstep_[a-z_]+)"', source))
    described = {
        name.removesuffix("_total").removesuffix("_info")
        for name in re.findall(r"`(keepstep_[a-z_]+)`", section(OBSERVE, "Metrics"))
    }
    assert exposed == described
    assert len(exposed) > 15


def test_events_are_all_described() -> None:
    source = ast.parse(Path(events.__file__).read_text("utf-8"))
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    told = [call.args[1] for call in calls if getattr(call.func, "id", "") == "ControlEvent"]
    kinds = {kind.value for kind in told if isinstance(kind, ast.Constant)} | {
        kind for kind, _ in events._ORDERS.values()
    }
    described = section(OBSERVE, "Logs").split("The events are:")[1]
    assert set(re.findall(r"`([^`]+)`", described)) == kinds
    assert len(kinds) > 20


def test_files_of_a_run_are_all_described() -> None:
    described = section(OBSERVE, "What is recorded")
    names = {runfolder.INFO, runfolder.JOURNAL, f"{runfolder.PHASES}/", runfolder.START_UP, runfolder.STORE}
    names |= {runfolder.WEIGHTS}
    names |= {process.TOKEN, "lease/", "earlier-N/"}
    assert set(re.findall(r"^\| `([^`]+)` \|", described, re.MULTILINE)) == names


def test_layers_are_those_that_are_enforced() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["id"] == "layers")
    enforced = [re.sub(r"[() ]", "", layer).split("|") for layer in layers]
    (drawn,) = (
        text for text in re.findall(r"```text\n(.*?)```", section(ARCHITECTURE, "Folders and import rules"), re.DOTALL)
    )
    parts: list[list[str]] = []
    for line in drawn.splitlines():
        names = re.split(r"\s{3,}", line.strip())[0]
        if names.startswith("│"):
            parts[-1] += re.findall(r"\w+", names)  # a row that goes on
        else:
            parts.append(re.findall(r"\w+", names))
    assert parts == [names for names in enforced if names != ["__main__"]]


NAMED = re.compile(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|toml|sbatch))`")
OF_A_RUN = {
    "phases/",
    "logs/",
    "logs/worker_N/stdout.log",
    "lease/",
    "earlier-N/",
    "../data",
    "model/...",
    "optimizer/...",
    "optimizer/3/exp_avg",
    "engine-1/NAME",
}
"""What looks like a file of the repository, and lies in a run's folder, in a checkpoint or with a user."""


def test_named_files_are_there() -> None:
    below = (
        ".",
        "src/keepstep",
        "src/keepstep/protocol",
        "src/keepstep/drill",
        "benchmarks",
        "docs",
        "examples/porting",
    )
    missing = [
        f"{page.name}: {name}"
        for page in TEXTS
        for name in NAMED.findall(FENCE.sub("", page.read_text("utf-8")))
        if name not in OF_A_RUN and not name.startswith("DIR/")
        if not any((ROOT / folder / name).exists() for folder in below)
    ]
    assert missing == []


def test_lines_of_text_are_wrapped() -> None:
    long = [
        f"{page.name}:{number}"
        for page in TEXTS
        for number, line in enumerate(
            FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text("utf-8")).splitlines(), start=1
        )
        if len(line) > WIDTH and not line.lstrip().startswith(("|", "!", "<", "`", "[")) and " " in line.strip()
    ]
    assert long == []


STOP_ON_THE_TOUR = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def test_the_tour_stops_at_what_is_there() -> None:
    stops = STOP_ON_THE_TOUR.findall((ROOT / "docs" / "tour.md").read_text("utf-8"))
    assert len(stops) > 30
    assert [stop for stop in stops if not defines(ROOT / "src" / "keepstep" / stop[0], stop[1])] == []
    assert not defines(ROOT / "src" / "keepstep" / "config.py", "nothing")


def defines(path: Path, name: str) -> bool:
    """Whether a file has a function, or a class with a method, of this name."""
    body: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body if path.exists() else []
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True
