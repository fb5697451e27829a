"""Which descriptors this process has: what a test opens, it must have given back at its end."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_descriptors() -> dict[int, str]:
    """What each descriptor of this process is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


@contextmanager
def given_back() -> Iterator[None]:
    """Fails if there are more descriptors afterwards than before."""
    before = open_descriptors().items()
    yield
    if open_descriptors().items() - before:
        gc.collect()  # what an exception still held
    kept = dict(open_descriptors().items() - before)
    assert not kept
