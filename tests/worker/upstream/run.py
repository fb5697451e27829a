"""Runs torch's tests one by one, each in processes of its own, and prints an outcome a line as JSON.

python -m tests.worker.upstream.run keepstep            all of them
python -m tests.worker.upstream.run gloo test_barrier   some, on plain gloo
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.worker import ranks
from tests.worker.upstream.suite import SIZE, names_of_tests, run_tests, set_environment

DEADLINE_S = 90.0
"""For one test; those of monitored_barrier take half a minute."""


def main() -> None:
    backend, names = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        set_environment(Path(folder), SIZE)
        os.environ["PYTHONWARNINGS"] = "ignore"
        ranks.CONTEXT.set_forkserver_preload(
            ["torch.testing._internal.distributed.distributed_test", "keepstep.worker.session"]
        )
        ranks.DEADLINE_S = DEADLINE_S
        for number, name in enumerate(names or names_of_tests()):
            path = Path(folder) / str(number)
            path.mkdir()
            try:
                outcomes = [answer[name] for answer in ranks.run_ranks(SIZE, run_tests, path, backend, [name])]
            except AssertionError as error:  # a rank died, or did not answer
                outcomes = [f"failed: {error}"]
            print(json.dumps([name, outcomes]), flush=True)


if __name__ == "__main__":
    main()
