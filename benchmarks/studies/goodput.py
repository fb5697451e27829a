"""Goodput: effective training time with keepstep and with checkpoint-restart at its best interval, against size.

    python -m benchmarks.studies.goodput                      prints the tables
    python -m benchmarks.studies.goodput --plot curve.svg     draws the curves as well

`downtime` contains every input, with its source or as an assumption.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Literal

from benchmarks.studies import history, plots
from benchmarks.studies.downtime import (
    DAY_S,
    LONG_RESTART_S,
    MEASURED_RECOVERY_S,
    PUBLISHED,
    SHORT_RESTART_S,
    Parameters,
    best_interval_s,
    best_ratio,
    checkpoint_restart,
    effective_ratio,
    of_size,
)
from rich import box
from rich.console import Console
from rich.table import Table

from keepstep.errors import ConfigurationError

SIZES = tuple(2**exponent for exponent in range(3, 18))
RECOVERIES_S = (60.0, 10.0, 1.0, MEASURED_RECOVERY_S)
RESTARTS_S = (LONG_RESTART_S, SHORT_RESTART_S)
RESTART_HEADERS = [f"s0 =\n{restart_s / 60:g} min" for restart_s in RESTARTS_S]
RECOVERY_HEADERS = [f"R =\n{round(recovery_s, 1):g} s" for recovery_s in RECOVERIES_S]
LIVED_SIZES = (1_024, 16_384, 131_072)
"""Numbers of devices of the simulated histories."""


def report(console: Console, plot: Path | None, seed: int) -> None:
    """Prints the tables and draws the picture.

    Args:
        console: where to print.
        plot: an .svg or .png file to draw into.
        seed: the seed of the simulated histories.

    Raises:
        ConfigurationError: the picture cannot be drawn; see `plots.line_chart`.
    """
    job = Parameters()
    console.print(_sizes())
    console.print(
        "[dim]Percent of the time that ends up in the model. every: best interval between checkpoints of a restart; "
        "s0: with a restart of so long; R: with keepstep and a recovery of so long "
        f"({MEASURED_RECOVERY_S} s is measured, with 3 ranks on CPU: a lower bound). lost: time lost at "
        f"s0 = {job.restart_s / 60:g} min / time lost at R = {job.recovery_s:g} s. pays: the percentage by which "
        "keepstep could slow down every step until that gain is gone.[/dim]\n"
    )
    console.print(_rates())
    console.print()
    console.print(_assumptions())
    console.print()
    console.print(_histories(seed))
    if plot is not None:
        _draw(plot)
        console.print(f"drawn: {plot}")


def _restarts(job: Parameters) -> list[Parameters]:
    return [dataclasses.replace(checkpoint_restart(job), restart_s=restart_s) for restart_s in RESTARTS_S]


def _recoveries(job: Parameters) -> list[Parameters]:
    return [dataclasses.replace(job, recovery_s=recovery_s) for recovery_s in RECOVERIES_S]


def _sizes() -> Table:
    title = "Effective training time against size, failures as in Llama 3 405B"
    headers = ["fail\na day", "\nevery", *RESTART_HEADERS, *RECOVERY_HEADERS, "\nlost", "\npays"]
    table = _table(title, "\ndevices", *headers)
    for size in SIZES:
        job = of_size(Parameters(), size)
        restarted, kept = best_ratio(checkpoint_restart(job)), best_ratio(job)
        table.add_row(
            f"{size:,}",
            f"{job.failures_per_s * DAY_S:.2g}",
            _span(best_interval_s(checkpoint_restart(job))),
            *(_percent(best_ratio(case)) for case in [*_restarts(job), *_recoveries(job)]),
            f"{(1 - restarted) / (1 - kept):.1f}",
            _slowdown(kept / restarted - 1),
        )
    return table


def _rates() -> Table:
    headers = ["\ndevices", "fail in\n1,000 years", "\none in", *RESTART_HEADERS, *RECOVERY_HEADERS[:2]]
    table = _table("The same at the published rates of failures", "\ncluster", *headers)
    for rate in PUBLISHED:
        job = of_size(Parameters(failures_per_device_s=rate.failures_per_device_s), rate.num_devices)
        table.add_row(
            rate.name,
            f"{rate.num_devices:,}",
            f"{rate.failures_per_device_s * 365 * DAY_S * 1000:.0f}",
            _span(1 / job.failures_per_s),
            *(_percent(best_ratio(case)) for case in [*_restarts(job), *_recoveries(job)[:2]]),
        )
    return table


def _assumptions() -> Table:
    job = Parameters()
    title = f"Each assumption changed alone, {job.num_devices:,} devices"
    table = _table(title, "assumed", "restart", "keepstep", "lost")
    change = functools.partial(dataclasses.replace, job)
    changes = {
        "as above": job,
        f"a checkpoint blocks for 3 s, not {job.checkpoint_s:g} s": change(checkpoint_s=3.0),
        f"a restart takes 60 s, not {job.restart_s:g} s": change(restart_s=60.0),
        f"a recovery takes 60 s, not {job.recovery_s:g} s": change(recovery_s=60.0),
        f"a step takes 60 s, not {job.step_s:g} s": change(step_s=60.0),
        f"10 % of failures need a checkpoint, not {100 * job.fallback_share:.1f} %": change(fallback_share=0.1),
        "50 % of failures need a checkpoint": change(fallback_share=0.5),
    }
    for what, changed in changes.items():
        restarted, kept = best_ratio(checkpoint_restart(changed)), best_ratio(changed)
        table.add_row(what, _percent(restarted), _percent(kept), f"{(1 - restarted) / (1 - kept):.1f}")
    return table


def _histories(seed: int) -> Table:
    title = f"Formula and simulated histories (mean ± 95 % interval), seed {seed}"
    headers = ["devices", "spares", "formula", "simulated", "failures", "fallbacks"]
    table = _table(title, "", *headers)
    for size in LIVED_SIZES:
        job = of_size(Parameters(), size)
        restarted = f"s0 = {job.restart_s / 60:g} min", checkpoint_restart(job)
        kept = f"R = {job.recovery_s:g} s", job
        for name, case in (restarted, kept):
            interval_s = best_interval_s(case)
            lived = history.simulate(case, interval_s, seed)
            table.add_row(
                name,
                f"{size:,}",
                str(case.num_spares),
                _percent(effective_ratio(case, interval_s)),
                f"{_percent(lived.ratio)} ± {196 * lived.standard_error:.2f}",
                f"{lived.num_failures:,}",
                f"{lived.num_fallbacks:,}",
            )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for header in (first, *others):
        justify: Literal["left", "right"] = "left" if header in ("", "\ncluster", "assumed") else "right"
        table.add_column(header, justify=justify, no_wrap=True)
    return table


def _slowdown(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.1 else f"{100 * share:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _draw(path: Path) -> None:
    # Best first. The measured recovery would lie on that of 1 s.
    names = [f"keepstep, R = {recovery_s:g} s" for recovery_s in RECOVERIES_S[-2::-1]]
    names += [f"restart in {restart_s / 60:g} min" for restart_s in reversed(RESTARTS_S)]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for size in SIZES:
        job = of_size(Parameters(), size)
        cases = [*_recoveries(job)[-2::-1], *reversed(_restarts(job))]
        for line, case in zip(lines.values(), cases, strict=True):
            line.append((size, 100 * best_ratio(case)))
    title = "Effective training time, failures as in Llama 3 405B"
    plots.line_chart(path, title, "devices", "percent of the time", lines)


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def main() -> None:
    """Prints the study that the command line asks for."""
    parser = argparse.ArgumentParser(description="Effective training time against checkpoint-restart.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves, as .svg or .png")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated histories (default: %(default)s)")
    chosen = parser.parse_args()
    try:
        report(Console(soft_wrap=True), chosen.plot, chosen.seed)
    except ConfigurationError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
