"""The model of links gives, where a case is small enough for a formula, what the formula gives."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from keepstep.protocol.transfer import topology

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BUCKET_BYTES, NUM_BUCKETS = 1_000_000, 12
FAST = 1e18


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/weights_model.py`; the scripts there import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("weights_model")


def network(model: ModuleType, **others: Any) -> Any:
    """8 Gbit/s, so that a bucket takes 1 ms; consumers and messages take no time."""
    settings = {
        "gbit_per_s": 8.0, "latency_s": 0.25e-3, "hop_s": 0.5e-3, "announce_s": 0.0, "consumer_s": 0.0,
        "say_s": 0.0,
        "reload_bytes_per_s": FAST, "num_slots": 64,
    }  # fmt: skip
    return model.Network(**(settings | others))


def seconds(model: ModuleType, num_nodes: int, fanout: int, **others: Any) -> float:
    links = network(model, **others)
    feeders = model.come(num_nodes, fanout, NUM_BUCKETS * BUCKET_BYTES, BUCKET_BYTES, links)
    return float(model.update_s(feeders, [BUCKET_BYTES] * NUM_BUCKETS, links))


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_a_chain(model: ModuleType, num_nodes: int) -> None:
    """Everything leaves the root once; then the last bucket goes on, step by step; then a word goes up, down and up."""
    expected_ms = NUM_BUCKETS + (num_nodes - 1) + num_nodes * 0.75 + 3 * num_nodes * 0.25
    assert seconds(model, num_nodes, 1) == pytest.approx(expected_ms / 1000)


@pytest.mark.parametrize(("num_nodes", "fanout"), [(1, 1), (6, 1), (6, 2), (14, 2), (12, 3)])
def test_it_agrees_with_the_formula_that_chooses_the_fanout(model: ModuleType, num_nodes: int, fanout: int) -> None:
    """Full trees, no words at the end."""
    depth = {1: 1, 6: 6 if fanout == 1 else 2, 14: 3, 12: 2}[num_nodes]
    formula_s = topology.update_s(num_nodes, fanout, NUM_BUCKETS * BUCKET_BYTES, BUCKET_BYTES, 1e9, 0.75e-3)
    found_s = seconds(model, num_nodes, fanout)
    assert found_s - 3 * depth * 0.25e-3 == pytest.approx(formula_s)


def test_with_one_slot_a_bucket_waits_until_the_one_before_has_gone_on(model: ModuleType) -> None:
    """Two nodes: the first has a bucket after 1.75 ms, and needs 1 ms to pass it on."""
    cycle_ms = 1 + 0.75 + 1
    expected_ms = (NUM_BUCKETS - 1) * cycle_ms + 2 * 1.75 + 6 * 0.25
    assert seconds(model, 2, 1, num_slots=1) == pytest.approx(expected_ms / 1000)


def test_with_one_slot_it_waits_for_the_consumer_too(model: ModuleType) -> None:
    """10 ms for a bucket; a consumer of one node, which feeds no other."""
    cycle_ms = 1 + 0.75 + 10
    expected_ms = NUM_BUCKETS * cycle_ms + 3 * 0.25
    found_s = seconds(model, 1, 1, num_slots=1, reload_bytes_per_s=1e8)
    assert found_s == pytest.approx(expected_ms / 1000)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_messages_of_buckets_come_one_after_the_other(model: ModuleType, num_nodes: int) -> None:
    """3 ms for each bucket are more than the link takes, however many nodes there are."""
    expected_ms = NUM_BUCKETS * 3 + num_nodes * 1.75 + 3 * num_nodes * 0.25
    assert seconds(model, num_nodes, 1, announce_s=3e-3) == pytest.approx(expected_ms / 1000)


def test_each_consumer_takes_the_publishers_node_some_time(model: ModuleType) -> None:
    more_s = seconds(model, 4, 1, consumer_s=1e-3) - seconds(model, 4, 1)
    assert more_s == pytest.approx(4e-3)


def test_words_at_the_end_go_through_all_nodes_between(model: ModuleType) -> None:
    more_s = seconds(model, 4, 1, say_s=1e-3) - seconds(model, 4, 1)
    assert more_s == pytest.approx(3 * 4 * 1e-3)


def test_nodes_are_fed_as_the_product_decides(model: ModuleType) -> None:
    assert model.come(3, 1, 1, 1, network(model)) == {1: 0, 2: 1, 3: 2}
    assert model.come(4, 2, 1, 1, network(model)) == {1: 0, 2: 0, 3: 1, 4: 1}
    little = model.come(512, None, 64 << 20, 4 << 20, network(model, gbit_per_s=40.0))
    assert max(list(little.values()).count(node) for node in little) > 1, "a tree"


def test_buckets_are_cut_by_the_plan(model: ModuleType) -> None:
    sizes = model.buckets_of(256 << 20, 4 << 20)
    assert max(sizes) == 4 << 20
    assert sum(sizes) == pytest.approx(model.architecture_of(256 << 20).num_bytes, rel=0.001)


def test_the_tables_say_what_is_assumed(model: ModuleType) -> None:
    (section,) = model.sections(((1 / 64, 5.0),), 1 << 20, nodes=(1, 3))
    assert [row[0] for row in section.rows] == ["1", "3"]
    assert all(len(row) == len(section.columns) for row in section.rows)
    assert any("full duplex" in note for note in section.notes)
