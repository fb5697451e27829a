"""What every test shares: the seed of a run, and the settings of hypothesis."""

import os
import secrets
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

SEED_VARIABLE = "KEEPSTEP_TEST_SEED"
SEED = pytest.StashKey[int]()
SECONDS = Counter[str]()
"""How long each test took, by its id."""

# No deadline: time is measured in benchmarks/, never asserted in a test.
hypothesis.settings.register_profile("keepstep", deadline=None)
hypothesis.settings.load_profile("keepstep")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Expected stories are files, and reviewed like code."""
    parser.addoption("--regenerate", action="store_true", help="write the stories of tests/scenarios anew")
    parser.addoption("--record-durations", metavar="FILE", help="write how long each test took, slowest first")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run: the one that was asked for, or a fresh one."""
    text = os.environ.get(SEED_VARIABLE)
    try:
        config.stash[SEED] = secrets.randbits(32) if text is None else int(text)
    except ValueError:
        raise pytest.UsageError(f"{SEED_VARIABLE} must be a whole number, not {text!r}") from None


def pytest_report_header(config: pytest.Config) -> str:
    """Show the seed at the top, so that any run can be repeated."""
    return f"keepstep seed: {config.stash[SEED]} (repeat with {SEED_VARIABLE}={config.stash[SEED]})"


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the setup, call and teardown of each test."""
    SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the durations where that was asked for."""
    path = session.config.getoption("--record-durations")
    if path and not hasattr(session.config, "workerinput"):  # with xdist, the process that hears of all tests
        slowest_first = sorted(SECONDS.items(), key=lambda item: -item[1])
        Path(path).write_text("".join(f"{seconds:.2f} {test}\n" for test, seconds in slowest_first))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run. Pytest shows the line printed here beside a test that failed."""
    value = request.config.stash[SEED]
    print(f"repeat with {SEED_VARIABLE}={value}")
    return value
