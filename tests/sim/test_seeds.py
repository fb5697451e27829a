"""Ten thousand jobs, none of which may fail a check; the same ones everywhere."""

import os

from keepstep.cli.simulate import replay_command, summary
from keepstep.sim.batch import Tally, run_on_all_cores

NUM_SEEDS = 10_000


def test_no_seed_fails() -> None:
    total = Tally()
    for tally in run_on_all_cores(0, NUM_SEEDS, os.cpu_count() or 1, None):
        total.add(tally)
    print(summary(total))
    assert total.num_seeds == NUM_SEEDS
    assert total.num_failures > NUM_SEEDS  # and as many recoveries: these were not idle
    failed = [f"{each.check}: {each.detail}\n  {replay_command(each.seed)} --shrink" for each in total.failed]
    assert not failed, "\n".join(failed)
