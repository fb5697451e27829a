"""What a node of ``keepstep weights`` tells Prometheus, in a file."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepstep.cli.cluster import weights
from keepstep.cli.cluster.weights_metrics import MetricsFile, metrics_text

BEFORE: Any = SimpleNamespace(version=None, num_tunnels=0, num_bytes=0)
LATER: Any = SimpleNamespace(version=17, num_tunnels=3, num_bytes=2**40)


def told(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels."""
    families = text_string_to_metric_families(text)
    assert all(family.documentation for family in text_string_to_metric_families(text))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_before_the_first_version_and_later() -> None:
    name = "keepstep_weights_node_"
    assert told(metrics_text("serve", BEFORE, {})) == {
        (f"{name}tunnels", "serve"): 0,
        (f"{name}received_bytes_total", "serve"): 0,
    }
    links = {"engine-1": ("", 0.0), "engine-2": ("engine-1", 1.25e9)}
    assert told(metrics_text("serve", LATER, links)) == {
        (f"{name}version", "serve"): 17,
        (f"{name}tunnels", "serve"): 3,
        (f"{name}received_bytes_total", "serve"): 2**40,
        (f"{name}link_bytes_per_second", "engine-1", "serve"): 0,
        (f"{name}link_bytes_per_second", "engine-2", "engine-1"): 1.25e9,
    }


def test_a_node_may_be_called_anything() -> None:
    node = 'a "b" \\ c\nd'
    assert {labels[1] for labels in told(metrics_text(node, LATER, {}))} == {node}


def test_the_file_is_written_from_time_to_time_and_goes_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter((100.0, 100.0, 104.0, 106.0, 106.0))
    monkeypatch.setattr("keepstep.cli.cluster.weights_metrics.monotonic", lambda: next(times_s))
    written = iter("abc")
    file = MetricsFile(tmp_path / "x.prom", lambda: next(written))
    seen = []
    for _ in range(3):
        file.tick()
        seen.append((tmp_path / "x.prom").read_text())
    assert seen == ["a", "a", "b"]
    file.remove()
    assert list(tmp_path.iterdir()) == []
    nothing = MetricsFile(None, lambda: next(written))
    nothing.tick()
    nothing.remove()
    assert list(written) == ["c"]


def test_a_file_that_cannot_be_written_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "LOOK_S", 0.001)
    stop = threading.Event()
    (tmp_path / "x.prom").mkdir()
    waiting = threading.Thread(target=weights._wait, args=(stop, MetricsFile(tmp_path / "x.prom", lambda: "")))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    stop.set()
    waiting.join(10)
    assert capsys.readouterr().err.count("metrics are written no more") == 1
