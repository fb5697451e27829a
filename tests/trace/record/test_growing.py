"""Files that a controller cannot write any more."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.errors import ConfigurationError
from keepstep.trace.record.growing import GrowingFile, check_whole


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process do not grow beyond 10 bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_is_appended_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"abc", b"def"):
        file = GrowingFile(path, is_durable=True)
        file.append(data)
        file.close()
    check_whole(path)
    assert path.read_bytes() == b"abcdef"
    assert path.stat().st_mode & 0o777 == 0o600
    GrowingFile(path, is_empty=True).close()
    assert path.read_bytes() == b""


@pytest.mark.usefixtures("small_disk")
def test_a_file_on_a_full_disk_is_given_up_and_no_controller_goes_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = GrowingFile(path)
    file.append(b"12345678")
    assert file.error is None
    file.append(b"abcdef")
    assert isinstance(file.error, OSError)
    assert file.error.errno == errno.EFBIG
    file.empty()
    file.append(b"x")
    file.close()
    assert path.read_bytes() == b"12345678ab", "nothing is written behind a gap"
    with pytest.raises(ConfigurationError, match="what came last could not be written there"):
        check_whole(path)


def test_a_file_that_is_not_there_is_whole(tmp_path: Path) -> None:
    check_whole(tmp_path / "file")


def test_a_file_that_was_replaced_is_not_at_its_path(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = GrowingFile(path)
    assert file.is_at(path)
    path.unlink()
    assert not file.is_at(path)
    path.touch()
    assert not file.is_at(path)
    file.give_up(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    check_whole(path)
    file.close()
