"""What is counted of a run, against what the job itself and its journal say; and what Grafana asks for."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser as promql
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.support import published
from tests.support.recorded import LONE, NUM_RANKS, NUM_STEPS, Recorded, growing, overtaken_run, recorded_run

from keepstep.dashboard import metrics
from keepstep.dashboard.metrics import PHASE_BOUNDS_S, Buckets, RunCollector
from keepstep.sim.recording import SNAPSHOT_BYTES
from keepstep.trace.record.phaselog import NO_RANK
from keepstep.trace.timeline.describe import PARTS
from keepstep.trace.timeline.pace import DurationArray
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.stragglers import Straggler

GRAFANA = Path(metrics.__file__).with_name("grafana.json")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return overtaken_run(tmp_path_factory.getbasetemp())


class Scraped:
    """A run with its collector, scraped as Prometheus does it."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self._collector = RunCollector(self.run)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)

    def look(self) -> DurationArray:
        news = self.run.poll()
        self._collector.observe(news)
        return news.durations

    def samples(self) -> list[Sample]:
        text = generate_latest(self._registry).decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def values(self) -> Samples:
        return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in self.samples()}


def value(values: Samples, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


def num_recoveries(scraped: Scraped) -> float:
    return sum(num for (name, _), num in scraped.values().items() if name == "keepstep_recoveries_total")


def test_a_run_as_its_job_reports_it(real: Recorded) -> None:
    scraped = Scraped(real.folder)
    scraped.look()
    found = scraped.values()
    (recovery,) = real.report["recoveries"]
    assert value(found, "keepstep_steps_total") == value(found, "keepstep_step") == NUM_STEPS
    assert value(found, "keepstep_world_size") == NUM_RANKS
    assert value(found, "keepstep_generation") == real.report["generation"] == 2
    assert value(found, "keepstep_recoveries_total", cause="signal") == 1
    assert value(found, "keepstep_failures_total", cause="signal") == 1
    assert value(found, "keepstep_recoveries_total", cause="hang") == 0
    assert value(found, "keepstep_steps_recomputed_total") == recovery["steps_recomputed"] == 1
    assert value(found, "keepstep_restored_bytes_total") == recovery["received_bytes"] > 0
    for part in PARTS:
        assert value(found, "keepstep_recovery_seconds_count", part=part) == 1
        took_ms = value(found, "keepstep_recovery_seconds_sum", part=part) * 1000
        assert took_ms == pytest.approx(recovery["milliseconds"][part], abs=0.001)
    assert value(found, "keepstep_spares", state="wanted") == 1
    assert 0 < value(found, "keepstep_goodput_ratio") < 1
    assert [value(found, "keepstep_rank_step", rank=str(rank)) for rank in range(NUM_RANKS)] == [NUM_STEPS - 1] * 3
    stages = {dict(labels)["stage"]: on for (name, labels), on in found.items() if name == "keepstep_stage"}
    assert [stage for stage, on in stages.items() if on] == ["ended"]
    assert value(found, "keepstep_running") == 0
    info = scraped.run.info
    assert value(found, "keepstep_run_info", run=info.run, version=info.version, node=info.node) == 1
    assert value(found, "keepstep_last_event_age_seconds") > 0


def test_snapshots_of_a_sharded_job(sharded: Path) -> None:
    scraped = Scraped(sharded)
    scraped.look()
    found = scraped.values()
    assert value(found, "keepstep_snapshot_step") == 10
    assert value(found, "keepstep_snapshot_interval_steps") == 2
    assert value(found, "keepstep_snapshot_bytes") == len(LONE) * SNAPSHOT_BYTES
    assert [value(found, "keepstep_rank_snapshot_step", rank=str(rank)) for rank in range(4)] == [10] * 4
    # Of steps 0, 2, ... 10 each rank took one; the replacement took that of the resume step again.
    assert value(found, "keepstep_snapshots_total") == 6 * len(LONE) + 1


def test_a_job_without_snapshots_has_no_metrics_of_them(real: Recorded) -> None:
    scraped = Scraped(real.folder)
    scraped.look()
    assert not [name for name, _ in scraped.values() if "snapshot" in name]


def test_published_weights(publishing: Path) -> None:
    scraped = Scraped(publishing)
    scraped.look()
    found, of = scraped.values(), {"folder": published.FOLDER}
    weights = "keepstep_weights_"
    assert value(found, f"{weights}version", **of) == 3
    assert value(found, f"{weights}version_under_way", **of) == 5
    assert value(found, f"{weights}version_age_seconds", **of) == pytest.approx(scraped.run.now_s - 3.0)
    for node, num, lag, since_s in (("a", 1, 0, None), ("engine-1", 2, 2, 2.0)):
        assert value(found, f"{weights}consumers", node=node, **of) == num
        assert value(found, f"{weights}lag_versions", node=node, **of) == lag
        lag_s = 0.0 if since_s is None else scraped.run.now_s - since_s
        assert value(found, f"{weights}lag_seconds", node=node, **of) == pytest.approx(lag_s)
    assert value(found, f"{weights}updates_total", outcome="committed", **of) == 3
    assert value(found, f"{weights}updates_total", outcome="broken off", **of) == 1
    assert value(found, f"{weights}lost_consumers_total", **of) == 1
    assert value(found, f"{weights}update_seconds_count", **of) == 3
    assert value(found, f"{weights}update_seconds_sum", **of) == 1.5
    assert value(found, f"{weights}sent_bytes_total", **of) == 6e9
    assert value(found, f"{weights}unchanged_bytes_total", **of) == 0
    assert value(found, f"{weights}update_bytes", **of) == 2e9
    assert value(found, f"{weights}update_bytes_per_second", **of) == 4e9


def test_a_job_that_publishes_nothing_has_no_metrics_of_it(real: Recorded) -> None:
    scraped = Scraped(real.folder)
    scraped.look()
    assert not [name for name, _ in scraped.values() if "weights" in name]


def test_phases_are_counted_as_if_one_by_one(real: Recorded) -> None:
    scraped = Scraped(real.folder)
    durations = scraped.look()
    found = scraped.values()
    for family, field in (("keepstep_phase_seconds", "whole_ns"), ("keepstep_phase_own_seconds", "own_ns")):
        for phase, label in enumerate(("starting", "forward", "backward", "synced", "optimizer", "between steps")):
            taken = [int(each[field]) / 1e9 for each in durations if each["phase"] == phase]
            if label == "starting" or (label == "synced" and "own" in family):
                assert (f"{family}_count", frozenset({("phase", label)})) not in found
                continue
            assert value(found, f"{family}_count", phase=label) == len(taken) > NUM_STEPS
            assert value(found, f"{family}_sum", phase=label) == pytest.approx(sum(taken))
            for bound in PHASE_BOUNDS_S:
                num_within = sum(seconds <= bound for seconds in taken)
                assert value(found, f"{family}_bucket", phase=label, le=str(bound)) == num_within


def test_a_bound_belongs_to_its_bucket_and_what_is_beyond_to_infinity() -> None:
    buckets = Buckets(["a", "b"], (0.5, 2.0))
    buckets.add(np.array([0, 0, 0, 1]), np.array([0.5, 0.6, 7.0, 2.0]))
    buckets.add(np.array([0]), np.array([2.5]))
    samples = {(s.name, s.labels["x"], s.labels.get("le")): s.value for s in buckets.family("h", "Text.", "x").samples}
    assert [samples["h_bucket", "a", le] for le in ("0.5", "2.0", "+Inf")] == [1, 2, 4]
    assert [samples["h_bucket", "b", le] for le in ("0.5", "2.0", "+Inf")] == [0, 1, 1]
    assert (samples["h_sum", "a", None], samples["h_count", "a", None]) == (10.6, 4)


def test_counters_only_grow_and_end_as_if_read_at_once(real: Recorded, tmp_path: Path) -> None:
    at_once = Scraped(real.folder)
    at_once.look()
    with growing(real.folder, tmp_path / "copy") as copy:
        scraped, before = Scraped(copy.folder), Counter[Any]()
        while copy.lines:
            copy.grow()
            scraped.look()
            counted = {key: num for key, num in scraped.values().items() if re.search("_(total|count|bucket)$", key[0])}
            assert all(num >= before[key] for key, num in counted.items())
            before = Counter(counted)
            is_known = bool(scraped.run.scenes) and scraped.run.scenes[0].end_s is not None
            assert value(counted, "keepstep_recoveries_total", cause="signal") == is_known
            assert value(scraped.values(), "keepstep_running") == 1
        copy.end()
        scraped.look()
    for key, num in at_once.values().items():
        if re.search("_(total|count|bucket)$", key[0]):
            assert scraped.values()[key] == num, key


def test_recoveries_without_an_end_have_no_gap(overtaken: Recorded) -> None:
    scraped = Scraped(overtaken.folder)
    scraped.look()
    found = scraped.values()
    first, second = overtaken.report["recoveries"]
    assert num_recoveries(scraped) == 2
    assert value(found, "keepstep_recovery_seconds_count", part="gap") == 0
    for part in PARTS:
        reached = [each["milliseconds"][part] for each in (first, second) if each["milliseconds"][part] is not None]
        assert value(found, "keepstep_recovery_seconds_count", part=part) == len(reached)
    assert value(found, "keepstep_recovery_seconds_count", part="restore") == 1
    assert value(found, "keepstep_steps_recomputed_total") == 0  # the step was not computed to its end again


def test_a_recovery_is_not_counted_while_it_may_be_overtaken(overtaken: Recorded, tmp_path: Path) -> None:
    with growing(overtaken.folder, tmp_path / "copy") as copy:
        scraped, seen = Scraped(copy.folder), []
        while copy.lines:
            copy.grow()
            scraped.look()
            ended = str(scraped.run.job.stage) == "ended"
            counted = num_recoveries(scraped)
            assert counted == (2 if ended else max(0, len(scraped.run.scenes) - 1))
            seen.append(counted)
    assert set(seen) == {0, 1, 2}


def test_a_launcher_that_died_leaves_nothing_uncounted(overtaken: Recorded, tmp_path: Path) -> None:
    with growing(overtaken.folder, tmp_path / "copy") as copy:
        scraped = Scraped(copy.folder)
        while len(scraped.run.scenes) < 2:
            copy.grow()
            scraped.look()
        assert num_recoveries(scraped) == 1
    scraped.look()  # it is dead, but what it wrote before may not have been read
    scraped.look()
    assert num_recoveries(scraped) == 2


def test_ranks_of_a_large_world_have_no_series(real: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_RANK_SERIES", NUM_RANKS - 1)
    scraped = Scraped(real.folder)
    assert (scraped.look()["rank"] != NO_RANK).any()
    assert not [name for name, _ in scraped.values() if name == "keepstep_rank_step"]


def test_stragglers_of_the_moment(real: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    scraped = Scraped(real.folder)
    found = [Straggler(2, "backward", 30.0, 20.0), Straggler(2, "forward", 14.0, 10.0)]
    monkeypatch.setattr(scraped.run.stragglers, "found", lambda: found)
    values = scraped.values()
    assert value(values, "keepstep_stragglers") == 1
    assert value(values, "keepstep_straggler_ratio", rank="2", phase="backward") == 1.5
    found.clear()
    assert "keepstep_straggler_ratio" not in {name for name, _ in scraped.values()}


# ---- Grafana --------------------------------------------------------------------------------------------------------

VARIABLES = {"$__rate_interval": "1m", "$__interval": "1m", "$run": "some"}
ADDED_BY_PROMETHEUS = {"job", "instance"}


def dashboard() -> dict[str, Any]:
    return dict(json.loads(GRAFANA.read_text(encoding="utf-8")))


def queries() -> Iterator[tuple[str, str, str]]:
    """Title, query and legend of everything that the dashboard asks for."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for annotation in dashboard()["annotations"]["list"]:
        yield annotation["name"], annotation["expr"], ""


def parsed(query: str) -> promql.Expr:
    for name, text in VARIABLES.items():
        query = query.replace(name, text)
    assert "$" not in query
    return promql.parse(query)


def asked_for(query: str) -> tuple[list[tuple[str, set[str]]], set[str]]:
    """What a query is about: its metrics, each with the labels it matches, and the labels it groups and joins by."""
    metrics_found: list[tuple[str, set[str]]] = []
    grouping: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            metrics_found.append((str(node.name), {matcher.name for matcher in node.matchers.matchers}))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouping.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            grouping.update(node.modifier.matching.labels)

    promql.walk(parsed(query), visit)
    return metrics_found, grouping


@pytest.fixture(scope="module")
def exposed(real: Recorded, sharded: Path, publishing: Path) -> dict[str, set[str]]:
    """Every metric that a collector has exposed, with its labels."""
    labels: dict[str, set[str]] = {}
    for folder in (real.folder, sharded, publishing):
        scraped = Scraped(folder)
        scraped.look()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(scraped.run.stragglers, "found", lambda: [Straggler(0, "forward", 2.0, 1.0)])
            for sample in scraped.samples():
                labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize(("title", "query", "legend"), [*queries()])
def test_grafana_asks_for_what_is_exposed(exposed: dict[str, set[str]], title: str, query: str, legend: str) -> None:
    found, grouping = asked_for(query)
    assert found, title
    about: set[str] = set()
    for name, matched in found:
        assert name in exposed, f"{title}: {name} is not exposed"
        assert matched <= exposed[name], f"{title}: {name} has no label {matched - exposed[name]}"
        about |= exposed[name]
    assert grouping <= about | ADDED_BY_PROMETHEUS, title
    assert set(re.findall(r"{{(\w+)}}", legend)) <= about, title
    assert "keepstep_run_info" in dict(found), f"{title}: is of all runs"


def test_a_query_for_something_else_would_be_found() -> None:
    found, grouping = asked_for(
        'sum by (a) (rate(x_total{b="c"}[$__rate_interval]) * on (d) group_left () y{e="$run"})'
    )
    assert (found, grouping) == ([("x_total", {"b"}), ("y", {"e"})], {"a", "d"})
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        asked_for("sum by (a) rate(x_total[1m]")


def test_grafana_shows_everything_that_is_exposed(exposed: dict[str, set[str]]) -> None:
    shown = {name for _, query, _ in queries() for name, _ in asked_for(query)[0]}
    families = {re.sub("_(total|bucket|sum|count|info)$", "", name) for name in exposed}
    missing = families - {re.sub("_(total|bucket|sum|count|info)$", "", name) for name in shown}
    assert missing == {"keepstep_running", "keepstep_world_size"}


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["id"] is None
    assert [(each["name"], each["type"]) for each in board["templating"]["list"]] == [
        ("datasource", "datasource"),
        ("run", "query"),
    ]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Training", "Recoveries", "Spares", "Stragglers", "Snapshots", "Published weights"]
    taken: Counter[tuple[int, int]] = Counter()
    for panel in board["panels"]:
        place = panel["gridPos"]
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        if panel["type"] != "row":
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert max(taken.values()) == 1, "panels lie upon each other"
    assert max(x for x, _ in taken) == 23
