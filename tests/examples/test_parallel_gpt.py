"""Ways to share the GPT: a pair of ranks learns what a single rank does, and what cannot be is refused."""

import re
import subprocess
import sys

import pytest
from tests.support.jobs import EXAMPLES, run

GPT = EXAMPLES / "train_gpt.py"
FLAGS = ("--steps", "6", "--log-every", "1", "--dropout", "0")


def trained(num_ranks: int, how: str) -> list[float]:
    """The losses of a job."""
    code, out, err = run("run", "--nproc-per-node", num_ranks, GPT, "--parallel", how, *FLAGS)
    assert code == 0, err
    found = [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)$", out, re.MULTILINE)]
    assert len(found) == 6
    return found


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """What two ranks learn that have the whole model each."""
    return trained(2, "ddp")


def test_tensor_parallelism_learns_the_same(expected: list[float]) -> None:
    """Each head has its own rows of q, k and v, and gradients are averaged over the two pairs."""
    assert trained(4, "tp") == pytest.approx(expected, abs=2e-4)  # four digits are printed


def test_pipelines_begin_with_the_same_model(expected: list[float]) -> None:
    """Then their head is no longer the embedding."""
    found = trained(4, "pp")
    assert found[0] == pytest.approx(expected[0], abs=2e-4)
    assert found == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--parallel", "pp"], 1, "--parallel pp needs an even number of ranks, not 1"),
        (["--parallel", "tp", "--publish", "somewhere"], 2, "--publish: serve_gpt.py cannot use"),
    ],
)
def test_what_cannot_be(flags: list[str], code: int, message: str) -> None:
    output = subprocess.run([sys.executable, GPT, *flags], capture_output=True, text=True, check=False, timeout=120)
    assert output.returncode == code
    assert message in output.stderr


def test_heads_that_cannot_be_shared() -> None:
    code, _out, err = run("run", "--nproc-per-node", 2, GPT, "--parallel", "tp", "--heads", 1)
    assert code == 1
    assert "--parallel tp: 2 ranks cannot share 1 heads; change --heads" in err
