"""The sweeper: whose groups it ends, and whose not."""

import subprocess
import sys
import textwrap

from tests.agent.crew import DEADLINE_S

SWEPT = """
    import os, subprocess
    from keepstep.worker.process.sweeper import Sweeper

    read, write = os.pipe()
    sweeper = Sweeper()
    os.close(write)
    print("read:", os.read(read, 1))  # when the sweeper has closed its copy
    cats = [
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(3)
    ]
    began, ended, unknown = cats
    sweeper.group_began(began.pid)
    sweeper.group_began(ended.pid)
    sweeper.group_ended(ended.pid)
    os.close(sweeper.descriptor)
    print("began:", began.wait())
    while os.waitpid(-1, 0)[0] in [cat.pid for cat in cats]:  # until the sweeper itself has ended
        pass
    for name, cat in (("ended", ended), ("unknown", unknown)):
        cat.stdin.write(b"alive")
        cat.stdin.close()
        print(f"{name}:", cat.stdout.read().decode())
"""


def test_whose_groups_it_ends() -> None:
    """A group that has ended is left alone, for its number may be another's by then; and nothing is held open."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SWEPT)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert process.stdout == "read: b''\nbegan: -9\nended: alive\nunknown: alive\n", process.stderr
