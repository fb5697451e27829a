"""Runs torch's tests in sequence in the same ranks, and prints an outcome a line as JSON.

python -m tests.worker.upstream.run keepstep            all of them: about four minutes on two cores
python -m tests.worker.upstream.run gloo test_barrier   some, on plain gloo

The ranks start over after a test that fails, since they may be at odds then. Tests that need a larger world get one.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.worker import ranks
from tests.worker.upstream.suite import TOO_SMALL, names_of_tests, outcomes_in, run_tests, set_environment

SIZES = (3, 4, 8)
"""Of worlds: what most of the tests are for, and what those take that call this too small."""
DEADLINE_S = 1500.0
"""For all tests in the same ranks; a single one has `suite.DEADLINE_S`."""


def outcomes_of(backend: str, size: int, names: list[str], folder: Path) -> dict[str, str]:
    """Of each of these tests in a world of this size."""
    found: dict[str, str] = {}
    for number in range(len(names)):
        left = [name for name in names if name not in found]
        if not left:
            break
        path = folder / f"{size}-{number}"
        path.mkdir()
        problem = "the ranks ended before it did"
        try:
            ranks.run_ranks(size, run_tests, path, backend, left)
        except AssertionError as error:  # a rank died, or did not answer
            problem = str(error)
        found |= outcomes_in(path, size)
        if (unfinished := next((name for name in left if name not in found), None)) is not None and (
            not any(found[name].startswith("failed") for name in left if name in found)
        ):
            found[unfinished] = f"failed: {problem}"
    return found


def main() -> None:
    backend, names = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        set_environment(Path(folder), SIZES[0])
        os.environ["PYTHONWARNINGS"] = "ignore"
        ranks.CONTEXT.set_forkserver_preload(["torch._dynamo", "keepstep.worker.session"])
        ranks.DEADLINE_S = DEADLINE_S
        left = names or names_of_tests()
        for size in SIZES:
            found = outcomes_of(backend, size, left, Path(folder))
            left = [name for name, outcome in found.items() if any(words in outcome for words in TOO_SMALL)]
            if size == SIZES[-1]:
                left = []
            for name, outcome in found.items():
                if name not in left:
                    print(json.dumps([name, outcome]), flush=True)


if __name__ == "__main__":
    main()
