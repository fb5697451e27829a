"""What the tests of launchers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.nodes import Nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Whatever is left of the processes is ended."""
    with Nodes(tmp_path).running() as found:
        yield found
