"""``keepstep drill``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from keepstep.drill import display
from keepstep.drill.drill import run_drill
from keepstep.drill.faults import default_faults, parse
from keepstep.launcher import report
from keepstep.launcher.flags import job_options, make_parser


def main(arguments: list[str]) -> int:
    """Runs a drill; 0 only if the weights are identical and every fault came about."""
    parser = make_parser("keepstep drill")
    parser.description = "Runs a job without and with failures and compares all protected state, bit for bit."
    own = parser.add_argument_group("drill")
    own.add_argument(
        "--faults",
        help="what fails, such as 'kill@step=7,phase=backward,rank=1; hang@...' (default: one kill in each phase)",
    )
    own.add_argument("--json", help="write the result to this file")
    chosen = parser.parse_args(arguments)
    # Each of the two runs gets a folder of its own later on, below the drill's.
    options = job_options(chosen, Path(tempfile.gettempdir()))
    world_size = options.recovery.world_size
    faults = parse(chosen.faults, world_size) if chosen.faults is not None else default_faults(world_size)
    display.introduce(len(faults))
    result = run_drill(options, faults, display.follow)
    display.show(result)
    if chosen.json:
        report.write(Path(chosen.json), result)
    return 0 if result["identical"] and not result["missed"] else 1
