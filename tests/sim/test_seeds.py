"""Many jobs, none of which may fail a check; the same ones everywhere."""

import os

import pytest

from keepstep.cli.simulate import replay_command, summary
from keepstep.sim.batch import Tally, run_on_all_cores


@pytest.mark.parametrize("num_seeds", [2_000, 10_000, 100_000])
def test_no_seed_fails(num_seeds: int) -> None:
    total = Tally()
    for tally in run_on_all_cores(0, num_seeds, os.cpu_count() or 1, None):
        total.add(tally)
    print(summary(total))
    assert total.num_seeds == num_seeds
    assert total.num_failures > num_seeds  # and as many recoveries: these were not idle
    failed = [f"{each.check}: {each.detail}\n  {replay_command(each.seed)} --shrink" for each in total.failed]
    assert not failed, "\n".join(failed)
