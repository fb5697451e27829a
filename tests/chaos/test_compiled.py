"""A compiled model loses ranks; a spare has compiled it before it is needed."""

from pathlib import Path

import pytest
from tests.support.jobs import SCRIPTS, drill

FAULTS = "kill@step=6,phase=forward,rank=1;kill@step=14,phase=backward,rank=0"


@pytest.mark.parametrize("how", ["compiled", "warm"])
def test_a_compiled_model(tmp_path: Path, how: str) -> None:
    arguments = ("--nproc-per-node", 2, "--spares", 1, "--faults", FAULTS)
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "compiled.py", how)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
    assert output.count("warm, with rank none") >= (2 if how == "warm" else 0)


@pytest.mark.parametrize(
    ("loop", "backend"),
    [
        ("transformers", "aot_eager"),
        ("transformers", "inductor"),
        ("accelerate", "aot_eager"),
        ("accelerate_by_hand", "aot_eager"),
        ("lightning", "aot_eager"),
        ("lightning_submodule", "aot_eager"),
        ("fabric", "aot_eager"),
    ],
)
def test_a_model_that_a_framework_compiles(tmp_path: Path, loop: str, backend: str) -> None:
    arguments = ("--nproc-per-node", 2, "--spares", 1, "--faults", FAULTS)
    code, result, output = drill(tmp_path, *arguments, SCRIPTS / "compiled_frameworks.py", loop, "--backend", backend)
    assert code == 0, output
    assert result["identical"]
    assert result["missed"] == []
