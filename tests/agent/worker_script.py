"""What the tests' workers do: one word says what."""

import os
import signal
import subprocess
import sys


def hold(descriptor: int) -> None:
    """Stands still until it is killed; says so, on a pipe that no other process holds open, with one byte."""
    os.write(descriptor, b"x")
    while True:
        signal.pause()


def main() -> None:
    what, *rest = sys.argv[1:]
    match what:
        case "exit":
            sys.exit(int(rest[0]))
        case "exit-text":
            sys.exit("a last word")
        case "exit-hard":
            os._exit(int(rest[0]))
        case "raise":
            raise ValueError("not today")
        case "signal":
            os.kill(os.getpid(), signal.Signals[rest[0]])
        case "hold":
            hold(3)
        case "hold-with-child":
            subprocess.Popen([sys.executable, __file__, "hold"], pass_fds=[3])
            while True:
                signal.pause()
        case "leave-a-child":
            subprocess.Popen([sys.executable, __file__, "hold"], pass_fds=[3])
            os.read(3, 1)  # the test says when


if __name__ == "__main__":
    main()
