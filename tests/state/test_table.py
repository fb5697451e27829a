"""Optimizers and modules of many packages, each in a job that loses ranks: table.md says what becomes of their state.

``make test-state`` runs this in an environment with all packages. With ``--regenerate`` it writes rows anew, as in
``pytest -m "" tests/state --regenerate -k Adam``.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tests.state.rows import OPTIMIZERS, ROWS
from tests.support.jobs import drill

HERE = Path(__file__).parent
TABLE = HERE / "table.md"
FAULTS = "kill@step=3,phase=backward,rank=1;kill@step=6,phase=optimizer,rank=0;kill@step=9,phase=forward,rank=1"
ERRORS = "ConfigurationError|StateMismatch|UsageError"
REFUSED = re.compile(rf"^keepstep drill: the run without failures .*? failed: (?:{ERRORS}): (.*)", re.MULTILINE)
FIRST_WORDS = 15
"""So many words of a refusal are in the table."""


def lines() -> dict[str, str]:
    """The lines of the table, by the row's name."""
    found = [line for line in TABLE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in found[2:]}


def write(name: str, line: str) -> None:
    """Puts a line into the table, in the place that the row has among all."""
    text = TABLE.read_text("utf-8")
    top = text[: text.index("| --- |")] + "| --- | --- | --- |"
    known = lines() | {name: line}
    TABLE.write_text("\n".join([top, *(known[each] for each in ROWS if each in known), ""]), "utf-8")


def seen(name: str, folder: Path) -> str:
    """Drills a row, and returns its line.

    Raises:
        AssertionError: the drill came to no result; the message is its output.
    """
    kind = "--optimizer" if name in OPTIMIZERS else "--module"
    told = folder / "carried"
    code, result, output = drill(
        folder, "--nproc-per-node", 2, "--faults", FAULTS, HERE / "job.py", kind, name, "--carried", told
    )
    refused = REFUSED.search(output)
    if refused:
        words = refused[1].replace("|", "/").split()
        more = " ..." if len(words) > FIRST_WORDS else ""
        return f"| {name} | {' '.join(words[:FIRST_WORDS])}{more} | refused |"
    assert code in (0, 1), output
    assert len(result["faults"]) == 3, output
    return f"| {name} | {told.read_text('utf-8') or 'nothing else'} | {'identical' if code == 0 else 'differs'} |"


def test_the_table_has_the_rows() -> None:
    assert list(lines()) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    package = ROWS[name].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-state")
    line = seen(name, tmp_path)
    if pytestconfig.getoption("--regenerate"):
        write(name, line)
    assert line == lines()[name]
