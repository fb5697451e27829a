"""What a node of ``keepstep weights`` tells Prometheus, in a file."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepstep.cli.cluster import weights, weights_metrics
from keepstep.cli.cluster.weights_metrics import metrics_in, metrics_text, server_metrics_text
from keepstep.errors import ConfigurationError, LoadError

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


def test_which_server_has_which_version_since_when() -> None:
    updates: Any = SimpleNamespace(
        urls=["http://a", "http://b"], versions={"http://a": (7, 1764500000.25)}, failures={"http://b": LoadError("x")}
    )
    name = "keepstep_weights_server_"
    assert told(server_metrics_text(updates)) == {
        (f"{name}version", "http://a"): 7,
        (f"{name}version_since_seconds", "http://a"): 1764500000.25,
        (f"{name}failed", "http://a"): 0,
        (f"{name}failed", "http://b"): 1,
    }


def test_a_node_may_be_called_anything() -> None:
    node = 'a "b" \\ c\nd'
    assert {labels[1] for labels in told(metrics_text(node, LATER, {}))} == {node}


def test_the_file_is_written_from_time_to_time_and_goes_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_metrics, "WRITE_S", 0.001)
    num_written, has_several = 0, threading.Event()

    def text() -> str:
        nonlocal num_written
        num_written += 1
        if num_written == 3:  # the second one lies there
            seen.append(target.read_text())
            has_several.set()
        return str(num_written)

    target, seen, notes = tmp_path / "x.prom", list[str](), list[str]()
    with metrics_in(str(target), text, notes.append):
        assert has_several.wait(10)
    assert (seen, notes) == (["2"], [])
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_nothing_is_written() -> None:
    with metrics_in(None, lambda: 1 / 0, print):  # type: ignore[arg-type, return-value]  # it is not called
        pass


def test_a_file_that_cannot_be_written_ends_nothing_else(tmp_path: Path) -> None:
    notes, has_noted = list[str](), threading.Event()

    def text() -> str:
        (tmp_path / "x.prom").mkdir()
        return ""

    with metrics_in(str(tmp_path / "x.prom"), text, lambda note: (notes.append(note), has_noted.set())[-1]):
        assert has_noted.wait(10)
    (note,) = notes
    assert note.startswith("metrics are no longer written: ")


@pytest.mark.parametrize("command", [["serve"], ["receive", "--from", "host:1"]])
def test_a_file_that_can_be_nowhere_is_refused(tmp_path: Path, command: list[str]) -> None:
    name, *flags = command
    arguments = [name, str(tmp_path / "w"), *flags, "--listen", "host:1", "--metrics", str(tmp_path / "no/x.prom")]
    with pytest.raises(ConfigurationError, match=r"--metrics .*no/x\.prom: the folder .* does not exist"):
        weights.main(arguments)
