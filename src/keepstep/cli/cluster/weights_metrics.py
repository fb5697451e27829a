"""``keepstep weights --metrics FILE``: metrics of a node's transfers, or of its servers, in a file for Prometheus.

The textfile collector of Prometheus' node_exporter reads the file. keepstep opens no port for metrics, so they need no
credentials.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.trace.targets import write_whole

if TYPE_CHECKING:
    from keepstep.engines.updates import ServerUpdates
    from keepstep.weights.remote.switch import Switch

WRITE_S = 5.0
"""Interval between two writes. Prometheus commonly scrapes every 15 s."""

Sample = tuple[Mapping[str, str], float]


@contextlib.contextmanager
def metrics_in(path: str | None, text: Callable[[], str], note: Callable[[str], None]) -> Iterator[None]:
    """Rewrites a file periodically in a thread until the block exits, then removes the file.

    Args:
        path: path of the file; None disables it.
        text: called in the thread; returns the current content.
        note: called in the thread with the error if a write fails. Writing stops then; nothing else does.
    """
    if path is None:
        yield
        return
    target, stop = Path(path), threading.Event()

    def write() -> None:
        try:
            while True:
                write_whole(target, text().encode())
                if stop.wait(WRITE_S):
                    return
        except OSError as error:
            note(f"metrics are no longer written: {error}")

    thread = threading.Thread(target=write, name="keepstep-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(OSError):
            target.unlink()  # its values are no longer true


def metrics_text(node: str, switch: Switch, links: Mapping[str, tuple[str, float]]) -> str:
    """Returns all metrics of a node in Prometheus' text format.

    Args:
        node: its name.
        switch: the switch through which its transfers pass.
        links: fed node -> (the node that feeds it, or an empty string for this one; bytes/s in its latest update).
    """
    own = {"node": node}
    fed = [({"node": name, "feeder": feeder or node}, rate) for name, (feeder, rate) in sorted(links.items())]
    versions: list[Sample] = [] if switch.version is None else [(own, switch.version)]
    return "".join(
        (
            _family("node_version", "gauge", "The last version that passed through this node and counts.", versions),
            _family(
                "node_tunnels", "gauge", "Consumers that are reached through this node.", [(own, switch.num_tunnels)]
            ),
            _family(
                "node_received_bytes_total",
                "counter",
                "Buckets that have come to this node.",
                [(own, switch.num_bytes)],
            ),
            _family(
                "node_link_bytes_per_second",
                "gauge",
                "How fast buckets came to a node in its latest update; 0 before the first.",
                fed,
            ),
        )
    )


def server_metrics_text(updates: ServerUpdates) -> str:
    """Returns the version of each server in Prometheus' text format."""
    versions, failures = updates.versions, updates.failures
    numbers: list[Sample] = [({"server": url}, number) for url, (number, _since_s) in versions.items()]
    times: list[Sample] = [({"server": url}, since_s) for url, (_number, since_s) in versions.items()]
    failed: list[Sample] = [({"server": url}, float(url in failures)) for url in updates.urls]
    return "".join(
        (
            _family("server_version", "gauge", "The version that an inference server has.", numbers),
            _family("server_version_since_seconds", "gauge", "Since when, as POSIX time.", times),
            _family("server_failed", "gauge", "Whether it has failed with the newest version.", failed),
        )
    )


def _family(name: str, kind: str, what: str, samples: Sequence[Sample]) -> str:
    name = f"keepstep_weights_{name}"
    lines = [f"{name}{{{_labels(labels)}}} {value:.17g}\n" for labels, value in samples]
    return "".join((f"# HELP {name} {what}\n", f"# TYPE {name} {kind}\n", *lines)) if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
