"""Docs run: what README.md and docs/ show is executed, and what they list is compared with the code.

A page has its own folder. Its ``python`` blocks are run there under plain Python, in their order; one that begins with
``# name.py`` leaves that file behind for the commands. Its ``console`` blocks are run after them, line by line: each
line that begins with ``$`` is a command, and has to end with exit code 0. A command that is not run stands in `NOT_RUN`
with the reason.
"""

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from tests.support import scenario

import keepstep
from keepstep import programs
from keepstep.cli import drill, main, simulate
from keepstep.cli.cluster import controller, weights
from keepstep.drill import faults
from keepstep.launcher import flags, signals
from keepstep.launcher.cluster import hosting
from keepstep.protocol import messages, recovery
from keepstep.protocol.messages import Cause
from keepstep.protocol.phases import Phase
from keepstep.protocol.recovery import records
from keepstep.sim import faults as simulated_faults
from keepstep.sim.oracle import Check
from keepstep.trace.timeline.describe import describe, describe_recovery

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
DEADLINE_S = 60
"""For one block or command; all take seconds. What hangs is killed, with everything it started."""

NOT_RUN = {
    "make demo": "the drill of the README's own script is run below; the demo itself takes twenty seconds",
    "pip install keepstep": "it installs from a network; the tests run what is here",
    "make test": "it is what runs this test",
    "python examples/serve_transformers.py": "tests/chaos/test_generation.py runs it",
    "python examples/rl_loop.py --kill": "tests/chaos/test_rl_loop.py runs it",
    "python examples/rl_vllm.py --kill": "tests/engines/real runs it, with a real server",
    "keepstep simulate --exhaustive 2": "tests/sim/test_exhaustive.py does the same",
    ".venv/bin/python benchmarks/scale.py --devices 512": "tests/benchmarks/test_scale.py runs it with fewer devices",
    "make soak SECONDS=600": "it takes ten minutes and writes to docs/; the README's 200 seeds are run",
    "keepstep run --nproc-per-node 3 --spares 1 train.py": "the drill in the next line runs the same job twice",
    (
        "keepstep drill --nproc-per-node 2 "
        '--faults "kill@step=3,phase=backward,rank=1; hang@step=8,phase=forward,rank=0" --json drill.json script.py'
    ): "parsed below; README.md's drill is run, with a kill in every phase",
    "keepstep drill --nproc-per-node 2 --spares 1 --compare out images_after.py": "tests/chaos/test_porting.py does",
    "keepstep drill --nproc-per-node 3 --faults none script.py": "tests/chaos has one",
    "keepstep dashboard run": "it serves until it is interrupted; tests/e2e looks at it",
    "keepstep status run": "it needs a job that runs at the same time; tests/launcher has one",
    "keepstep status run --json": "as above",
    'keepstep drill --nproc-per-node 3 --faults "kill@step=7,phase=synced; kill@during=restore,rank=0" script.py': (
        "parsed below, as above"
    ),
    'keepstep drill --nproc-per-node 3 --faults "kill@phase=random,count=3,seed=1" examples/train_gpt.py': (
        "parsed below, as above"
    ),
}
LANGUAGES = {"python", "console", "text", "mermaid", "diff"}
"""Of fenced blocks. A block that looks like code and is not checked would be a hole; test_docs_porting.py has diffs."""

FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """The name that a script gives itself in its first line."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[str]:
        """What stands behind ``$``, without the comment."""
        lines = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return [re.sub(r"\s+# .*", "", line).strip() for line in lines]


def blocks(page: str) -> list[Block]:
    return [Block(m["language"], m["text"], page.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(page)]


def anchors(page: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next of its level or a higher one."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert match, f"{page.name} has no section '{heading}'"
    return match[1]


def run(command: list[str], folder: Path) -> str:
    """Runs a command to its end and returns its output; fails the test if it fails or takes too long."""
    environment = dict(os.environ)
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = started.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        started.kill()  # workers die with their launcher
        output, _ = started.communicate(timeout=DEADLINE_S)
        pytest.fail(f"{shlex.join(command)} took more than {DEADLINE_S} s:\n{output}", pytrace=False)
    if started.returncode:
        pytest.fail(f"{shlex.join(command)} ended with {started.returncode}:\n{output}", pytrace=False)
    return output


def load_script(name: str) -> ModuleType:
    """A script of docs/ as a module; `docs` is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- what runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    found = blocks(page.read_text("utf-8"))
    for number, block in enumerate(block for block in found if block.language == "python"):
        script = tmp_path / (block.file_name or f"block_{number}.py")
        script.write_text(block.text, encoding="utf-8")
        run([sys.executable, script.name], tmp_path)
    for command in (command for block in found for command in block.commands):
        if command not in NOT_RUN and not command.startswith("python "):
            run(shlex.split(command), tmp_path)


def test_every_block_says_what_it_is() -> None:
    unknown = [
        f"{page.name}:{block.line}: {block.language or 'no language'}"
        for page in PAGES
        for block in blocks(page.read_text("utf-8"))
        if block.language not in LANGUAGES
    ]
    assert unknown == []


def test_commands_that_are_not_run_are_still_there() -> None:
    shown = {command for page in PAGES for block in blocks(page.read_text("utf-8")) for command in block.commands}
    assert NOT_RUN.keys() - shown == set()
    assert len(shown) > len(NOT_RUN), "nothing but exceptions"


def test_plain_python_commands_are_blocks_of_the_same_page() -> None:
    """`python x.py` is not run as a command, for the block x.py has been run already."""
    for page in PAGES:
        found = blocks(page.read_text("utf-8"))
        named = {block.file_name for block in found}
        commands = [command for block in found for command in block.commands if command not in NOT_RUN]
        plain = {shlex.split(command)[1] for command in commands if command.startswith("python ")}
        assert plain <= named


def test_fault_specifications_parse() -> None:
    shown = [command for page in PAGES for block in blocks(page.read_text("utf-8")) for command in block.commands]
    drills = [
        shlex.split(command) for command in shown if command.startswith("keepstep drill") and "--faults" in command
    ]
    assert len(drills) >= 3
    for words in drills:
        specification = words[words.index("--faults") + 1]
        assert faults.parse(specification, world_size=3) or specification == faults.NONE


# ---- what is drawn --------------------------------------------------------------------------------------------------


def test_diagrams_are_what_the_tables_say() -> None:
    diagrams = load_script("diagrams")
    page = diagrams.PAGE.read_text("utf-8")
    if diagrams.redrawn(page) != page:
        pytest.fail("docs/PROTOCOL.md is out of date: run 'python docs/diagrams.py'", pytrace=False)


def test_a_changed_table_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    diagrams = load_script("diagrams")
    page = diagrams.PAGE.read_text("utf-8")
    monkeypatch.delitem(recovery.TRANSITIONS[recovery.Stage.RECOVERING], recovery.Stage.STOPPING)
    assert diagrams.redrawn(page) != page
    with pytest.raises(ValueError, match="diagrams"):
        diagrams.redrawn(page.replace("<!-- diagram: stages -->", ""))


def test_labels_do_not_end_a_mermaid_statement() -> None:
    diagrams = load_script("diagrams")
    assert "a --> b: c – d" in diagrams.mermaid([("a", "b", "c: d")], "a", None)


def test_excerpts_are_those_of_the_stories() -> None:
    excerpts = load_script("excerpts")
    for path in excerpts.PAGES:
        page = path.read_text("utf-8")
        assert (
            len(excerpts.EXCERPT.findall(page)) == page.count("<!-- excerpt:") == page.count("<!-- end of excerpt -->")
        )
        if excerpts.redrawn(page) != page:
            pytest.fail(f"docs/{path.name} is out of date: run 'python docs/excerpts.py'", pytrace=False)


def test_every_scenario_is_shown_briefly() -> None:
    excerpts = load_script("excerpts")
    shown = {
        match["name"]: len(match["lines"].splitlines())
        for match in excerpts.EXCERPT.finditer(PROTOCOL.read_text("utf-8"))
    }
    assert shown.keys() <= {path.stem for path in excerpts.SCENARIOS.glob("*.txt")}
    assert len(shown) == 8
    assert max(shown.values()) <= 20


def test_an_excerpt_follows_its_story_and_invents_nothing() -> None:
    fitted = load_script("excerpts").fitted
    story = ["    1.000  a", "    2.000  b", "    3.000  a", "    4.000  c"]
    assert fitted(["    9.999  a", "    9.999  a"], story) == ["    1.000  a", "      ...", "    3.000  a", "      ..."]
    assert fitted(["    9.999  b", "      ...", "    9.999  c"], story) == [story[1], "      ...", story[3]]
    assert fitted(story, story) == story
    for wrong in (["    1.000  d"], ["    2.000  b", "    2.000  b"], ["    4.000  c", "    1.000  a"]):
        with pytest.raises(ValueError, match="no such line"):
            fitted(wrong, story)


def test_an_outline_has_the_faults_and_what_was_decided() -> None:
    outline = load_script("excerpts").outline
    story = ["seed 1", "    0.100  rank 0", "    1.000  FAULT   x", "    2.000  rank 1  y", "    3.000  END     z"]
    assert outline(story) == ["seed 1", "      ...", story[2], "      ...", story[4]]
    long = [*story[:4], *(f"    2.{number:03}  controller  {number}" for number in range(50)), story[4]]
    assert len(outline(long)) < 25
    assert outline(long)[-1] == story[4]


# ---- what is listed -------------------------------------------------------------------------------------------------

USAGE, PROTOCOL, DEPLOY = (ROOT / "docs" / name for name in ("USAGE.md", "PROTOCOL.md", "deploy.md"))
SIMULATION, TRACK_RECORD = ROOT / "docs" / "SIMULATION.md", ROOT / "docs" / "track-record.md"


def test_links_lead_somewhere() -> None:
    broken = []
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        text = page.read_text("utf-8")
        for match in LINK.finditer(FENCE.sub("", text)):
            path, _, anchor = match["target"].partition("#")
            if path.startswith("http"):
                continue
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
                broken.append(f"{page.name}: {match['target']}")
    assert broken == []


def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: a link to a page or heading that is not there, or a name of the API page, ends the build."""
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Joins the job" in (tmp_path / "site/api/index.html").read_text("utf-8")


def test_own_flags_are_all_described() -> None:
    parser = flags.make_parser("keepstep run")
    (own,) = [group for group in parser._action_groups if group.title == "keepstep"]
    described = section(USAGE, "keepstep run")
    assert [
        action.option_strings for action in own._group_actions if f"`{action.option_strings[0]}" not in described
    ] == []


def test_flags_of_several_nodes_are_all_described() -> None:
    (own,) = [
        group
        for group in flags.make_parser("keepstep run")._action_groups
        if group.title == "keepstep on several nodes"
    ]
    described = section(DEPLOY, "Flags")
    assert [
        action.option_strings for action in own._group_actions if f"`{action.option_strings[0]}" not in described
    ] == []


def test_flags_of_the_drill_are_all_described() -> None:
    (own,) = [group for group in drill._parser()._action_groups if group.title == "drill"]
    described = section(USAGE, "keepstep drill")
    assert [action.option_strings for action in own._group_actions if action.option_strings[0] not in described] == []


def test_flags_of_weights_are_all_described() -> None:
    described = section(ROOT / "docs" / "WEIGHTS.md", "Several machines")
    described += section(ROOT / "docs" / "integrations" / "README.md", "Engines")
    _, commands = weights._parsers()
    told = [action for each in commands for action in each._actions if action.help != argparse.SUPPRESS]
    options = {action.option_strings[-1] for action in told if action.option_strings}
    assert {option for option in options if f"`{option}" not in described} == {"--help"}


def test_no_flag_is_invented() -> None:
    known = {option for action in flags.make_parser("keepstep run")._actions for option in action.option_strings}
    known |= {option for action in simulate._parser()._actions for option in action.option_strings}
    known |= {option for action in drill._parser()._actions for option in action.option_strings}
    known |= {"--track-record", "--version"}  # of `keepstep simulate`, of the command itself
    _, commands = weights._parsers()
    known |= {option for each in commands for action in each._actions for option in action.option_strings}
    known |= {"--new", "--node", "--receiver", "--out", "--controller"}  # of `keepstep token` and agent
    known |= {option for action in controller._parser()._actions for option in action.option_strings}
    known |= {"--no-kill", "--kill-on-bad-exit", "--wait", "--signal"}  # of Slurm
    known |= {"--otel", "--once", "--listen"}  # of `keepstep run`, of the views
    known |= {"--nodes-per-relay", "--call-us"}  # of benchmarks/scale.py
    known |= {"--steps", "--size", "--batch-size", "--check", "--parallel"}  # of the examples, of docs/diagrams.py
    for page in PAGES:
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", FENCE.sub("", page.read_text("utf-8"))))
        assert shown - known == set(), page.name


def test_public_names_are_all_described() -> None:
    text = USAGE.read_text("utf-8")
    assert [name for name in keepstep.__all__ if name != "Step" and name not in text] == []


def test_exit_codes_are_all_described() -> None:
    described = section(PROTOCOL, "Exit codes")
    codes = {value for name, value in vars(recovery).items() if name.startswith("EXIT_")}
    codes |= {0, main.EXIT_USAGE, hosting.EXIT_USAGE, hosting.EXIT_SUPERSEDED}
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", described, re.MULTILINE)}
    ends = {name for table in programs.DISPOSITIONS.values() for name in table} - {"others"}
    for number in (signal.Signals[name] for name in ends):
        assert (code := signals.ended_by(number).exit_code) in codes or f"{code} for" in described


def test_signals_are_all_described() -> None:
    described = section(USAGE, "Hangs and signals")
    for program, table in programs.DISPOSITIONS.items():
        assert f"| {program} | {' | '.join(table.values())} |" in described


def test_report_fields_are_all_described() -> None:
    machine = recovery.RecoveryMachine(recovery.RecoverySettings(world_size=2, num_spares=1))
    record = records.RecoveryRecord(2, Cause.SIGNAL, "rank 1 lost", 0.0)
    described = section(USAGE, "Reports")
    fields = {*describe(machine, []), *describe_recovery(record), *record.milliseconds()}
    assert [field for field in fields if f"`{field}`" not in described] == []
    causes = {str(cause) for cause in Cause}
    assert [word for word in {*causes, *map(str, recovery.Stage)} if f"`{word}`" not in described] == []


def test_faults_are_all_described() -> None:
    described = section(USAGE, "keepstep drill")
    words = {*faults.KINDS, *faults.IN_A_STEP, *faults.MOMENTS}
    assert [word for word in words if f"`{word}`" not in described] == []
    assert "`phase=random`" in described


def test_messages_are_all_described() -> None:
    described = section(PROTOCOL, "Who talks to whom")
    names = {kind.__name__ for kind in messages.AnyMessage.__args__}
    assert len(names) > 25
    assert [name for name in names if f"`{name}`" not in described] == []


def test_simulation_is_all_described() -> None:
    text = SIMULATION.read_text("utf-8")
    options = {
        option
        for action in simulate._parser()._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
        if option not in ("-h", "--help")
    }
    assert [option for option in options if f"`{option}" not in text] == []
    assert [
        kind
        for kind in (
            *(*simulated_faults.WEIGHTS, *simulated_faults.RELAY_FAULTS),
            *(*simulated_faults.DEVICE_FAULTS, *simulated_faults.GROUP_FAULTS, *simulated_faults.LOAD_FAULTS),
        )
        if f"`{kind}`" not in section(SIMULATION, "Faults")
    ] == []
    assert [check for check in Check if f"| {check} |" not in section(SIMULATION, "The oracle")] == []


def test_lines_of_a_scenario_are_understood() -> None:
    (block,) = (block for block in blocks(section(SIMULATION, "Scenarios")) if block.language == "text")
    assert len(scenario.parse(f"A title\n{block.text}").deeds) == 7


def test_every_guard_is_there() -> None:
    """What the track record says of a bug is true as long as the test that it names exists."""
    rows = [line.split(" | ") for line in section(TRACK_RECORD, "Bugs").splitlines() if line.startswith("| 20")]
    assert len(rows) > 10
    tests = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    for *_, guard in rows:
        names = re.findall(r"`([^`]+)`", guard)
        assert names, guard
        files = [name for name in names if name.startswith("tests/")]
        text = "".join(tests[name] for name in [*files, "tests/sim/test_mutants.py"])
        assert [name for name in names if name not in files and f"def {name}(" not in text] == []


def test_a_soak_can_be_appended() -> None:
    """A line that is appended to the file is a row to its last table."""
    text = TRACK_RECORD.read_text("utf-8")
    table = section(TRACK_RECORD, "Soaks")[section(TRACK_RECORD, "Soaks").index("| date |") :]
    assert text.endswith(table)
    assert text.endswith("|\n")
    assert {line.count("|") for line in table.splitlines()} == {9}


def test_phases_are_all_described() -> None:
    text = PROTOCOL.read_text("utf-8")
    assert [phase for phase in Phase if f"`{phase}`" not in text] == []


# ---- each check can fail --------------------------------------------------------------------------------------------

SAMPLE = """# One
```python
# a.py
raise SystemExit(3)
```
```console
$ keepstep run x.py   # why
output
$ make test
```
## Two words, and more
"""


def test_blocks_are_found() -> None:
    script, console = blocks(SAMPLE)
    assert (script.language, script.file_name, script.line) == ("python", "a.py", 3)
    assert console.commands == ["keepstep run x.py", "make test"]
    assert anchors(SAMPLE) == {"one", "two-words-and-more"}


def test_a_block_that_fails_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(blocks(SAMPLE)[0].text, encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="ended with 3"):
        run([sys.executable, "a.py"], tmp_path)


def test_a_block_that_hangs_fails_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE_S", 0.2)
    with pytest.raises(pytest.fail.Exception, match="took more than"):
        run([sys.executable, "-c", "import signal; signal.pause()"], tmp_path)
