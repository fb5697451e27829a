"""What every test shares: the seed of a run, its tier, how long it took, and the settings of hypothesis."""

import functools
import gc
import os
import secrets
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import hypothesis
import pytest

SEED_VARIABLE = "KEEPSTEP_TEST_SEED"
SEED = pytest.StashKey[int]()
SECONDS = Counter[str]()
"""How long each test took, by its id."""
FROZEN: set[Path] = set()
"""Files of tests before which that was done."""
LISTED_S = 1.0
"""Of a record of durations: a test that takes less is not listed by itself."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # after a script's "&"; the programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: time is measured in benchmarks/, never asserted in a test.
hypothesis.settings.register_profile("keepstep", deadline=None)
hypothesis.settings.load_profile("keepstep")


TIERS = Path(__file__).parent / "tiers.toml"
QUICK = "quick"


@functools.cache
def tiers() -> Mapping[str, str]:
    """The tier of every test that the file names: beginning of a test's id -> tier."""
    table = tomllib.loads(TIERS.read_text(encoding="utf-8"))
    return {f"tests/{test}": tier for tier, content in table.items() for test in content["tests"]}


def tier_of(test: str) -> str:
    """What runs a test: the longest beginning of its id that the file names says so; `make test` where none does."""
    named = max((beginning for beginning in tiers() if test.startswith(beginning)), key=len, default="")
    return tiers().get(named, QUICK)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier."""
    for item in items:
        item.add_marker(tier_of(item.nodeid))


def pytest_collection_finish() -> None:
    """Keep the imported modules out of the garbage collector's sight, and torch to one thread, as torchrun does.

    Without the first, whatever looks at all objects of a process takes 0.1 to 0.3 s in each test.
    """
    gc.collect()  # each file of tests begins with a freeze
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a file of tests leaves behind, and what it has imported, is as little in the next one's way."""
    if item.path not in FROZEN:
        FROZEN.add(item.path)
        gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Expected stories are files, and reviewed like code."""
    parser.addoption("--regenerate", action="store_true", help="regenerate the traces of tests/scenarios")
    parser.addoption("--record-durations", metavar="FILE", help="write how long each test took, slowest first")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run: the one that was asked for, or a fresh one."""
    text = os.environ.get(SEED_VARIABLE)
    try:
        config.stash[SEED] = secrets.randbits(32) if text is None else int(text)
    except ValueError:
        raise pytest.UsageError(f"{SEED_VARIABLE} must be a whole number, not {text!r}") from None
    os.environ[SEED_VARIABLE] = str(config.stash[SEED])  # for the processes of pytest-xdist


def pytest_report_header(config: pytest.Config) -> str:
    """Show the seed at the top, so that any run can be repeated."""
    return f"keepstep seed: {config.stash[SEED]} (repeat with {SEED_VARIABLE}={config.stash[SEED]})"


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the setup, call and teardown of each test."""
    SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the durations where that was asked for, and give the collector all objects back.

    Of those it may not collect, nanobind, in the triton of torch 2.15, prints a page at the end of a process.
    """
    gc.unfreeze()
    path = session.config.getoption("--record-durations")
    if path and not hasattr(session.config, "workerinput"):  # in the process that hears of all tests
        slowest_first = sorted(SECONDS.items(), key=lambda item: -item[1])
        lines = [f"{seconds:.1f} {test}" for test, seconds in slowest_first if seconds >= LISTED_S]
        rest = [seconds for seconds in SECONDS.values() if seconds < LISTED_S]
        Path(path).write_text("\n".join([*lines, f"{sum(rest):.1f} {len(rest)} others", ""]), encoding="utf-8")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run. Pytest shows the line printed here beside a test that failed."""
    value = request.config.stash[SEED]
    print(f"repeat with {SEED_VARIABLE}={value}")
    return value
