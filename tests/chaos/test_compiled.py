"""A compiled model loses ranks; a spare has compiled it before it is needed."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill


@pytest.mark.parametrize("how", ["compiled", "warm"])
def test_a_compiled_model(tmp_path: Path, how: str) -> None:
    faults = "kill@step=6,phase=forward,rank=1;kill@step=14,phase=backward,rank=0"
    arguments = ("--nproc-per-node", 2, "--spares", 1, "--faults", faults)
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "compiled.py", how)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert output.count("warm, with rank none") >= (2 if how == "warm" else 0)
