"""Recoveries as traces: what is in them, against what the job says; and that exporting touches no job."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.support.jobs import SCRIPTS
from tests.support.published import FOLDER, news, published_run
from tests.support.recorded import KILL, NUM_RANKS, NUM_STEPS, Recorded, overtaken_run, record, recorded_run

from keepstep.cli import ahead as cli
from keepstep.errors import ConfigurationError
from keepstep.integrations import opentelemetry
from keepstep.protocol.messages import PublicationStage
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import LABELS

PARTS = ("detect", "stop", "decide", "reset", "restore", "resume")
TINY = ("--nproc-per-node", 2, SCRIPTS / "tiny.py")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return overtaken_run(tmp_path_factory.getbasetemp())


def exported(folder: Path) -> tuple[Run, list[ReadableSpan]]:
    """The spans of all recoveries of a run that is over."""
    run, found = Run(folder), InMemorySpanExporter()
    run.poll()
    spans_of = opentelemetry.provider(found)
    for scene in run.scenes:
        opentelemetry.export(scene, run, spans_of.get_tracer("test"))
    spans_of.shutdown()
    return run, list(found.get_finished_spans())


def roots(spans: Sequence[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.parent is None]


def test_a_recovery_is_a_trace(recorded: Recorded) -> None:
    run, spans = exported(recorded.folder)
    (recovery,), (root,), (scene,) = recorded.report["recoveries"], roots(spans), run.scenes
    assert root.name == "keepstep.recovery"
    assert root.status.is_unset
    attributes = dict(root.attributes or {})
    assert attributes.pop("keepstep.detail") == recovery["detail"]
    assert attributes == {
        "keepstep.run": run.info.run,
        "keepstep.generation": 2,
        "keepstep.cause": "signal",
        "keepstep.ranks": (1,),
        "keepstep.nodes": (run.info.node,),
        "keepstep.world_size": NUM_RANKS,
        "keepstep.resume_step": recovery["resume_step"],
        "keepstep.steps_recomputed": recovery["steps_recomputed"],
        "keepstep.restored_bytes": recovery["received_bytes"],
        "keepstep.overtaken": False,
    }
    parts = [span for span in spans if span.parent is not None]
    assert [span.name for span in parts] == [f"keepstep.{part}" for part in PARTS]
    begin_ns = root.start_time
    assert begin_ns == run.info.unix_ns(scene.since_s)
    for span, part in zip(parts, PARTS, strict=True):
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.start_time == begin_ns, "each begins where the one before it has ended"
        assert span.end_time is not None
        assert (span.end_time - span.start_time) / 1e6 == pytest.approx(recovery["milliseconds"][part], abs=0.002)
        begin_ns = span.end_time
    assert root.end_time == begin_ns
    assert run.info.started_unix_ns < root.start_time < root.end_time


def test_an_update_of_published_weights_is_a_span(recorded: Recorded, tmp_path: Path) -> None:
    """Once, when all devices have told of it; a consumer that was left out is an event of it."""
    run, found = Run(published_run(recorded.folder, tmp_path / "run")), InMemorySpanExporter()
    run.poll()
    updates, spans_of = opentelemetry.NewUpdates(run), opentelemetry.provider(found)
    publication, tracer = run.publications.found[FOLDER], spans_of.get_tracer("test")
    assert list(updates.take()) == [publication]
    opentelemetry.export_update(publication, run, tracer)
    assert list(updates.take()) == []
    left_out = ("engine-1/dead: is gone",)
    publication.take("a", news(0, PublicationStage.COMMITTED, 6, 6.0, (("near", 6),)))
    assert list(updates.take()) == [], "rank 1 has told nothing of it yet"
    publication.take("b", news(1, PublicationStage.COMMITTED, 6, 6.1, (), left_out))
    assert list(updates.take()) == [publication]
    opentelemetry.export_update(publication, run, tracer)
    spans_of.shutdown()
    first, second = found.get_finished_spans()
    assert {first.name, second.name} == {"keepstep.weights.update"}
    assert dict(second.attributes or {}) == {
        "keepstep.run": run.info.run,
        "keepstep.weights.folder": FOLDER,
        "keepstep.weights.version": 6,
        "keepstep.weights.devices": 2,
        "keepstep.weights.consumers": 1,
        "keepstep.weights.sent_bytes": 2 * 10**9,
        "keepstep.weights.unchanged_bytes": 0,
    }
    assert (second.start_time, second.end_time) == (run.info.unix_ns(5.5), run.info.unix_ns(6.1))
    assert [event.name for event in second.events] == list(left_out)
    run.close()


def test_what_ranks_were_at_are_events_of_the_part(recorded: Recorded) -> None:
    run, spans = exported(recorded.folder)
    found = [(event.name, event.timestamp, dict(event.attributes or {})) for span in spans for event in span.events]
    expected = run.scenes[0].spans()
    assert len(found) == len(expected) > NUM_RANKS
    for span in expected:
        assert span.end_s is not None
        attributes = {
            "keepstep.rank": span.rank,
            "keepstep.span": str(span.kind),
            "keepstep.duration_ms": round((span.end_s - span.begin_s) * 1000, 3),
        }
        assert (f"rank {span.rank}: {LABELS[span.kind]}", run.info.unix_ns(span.begin_s), attributes) in found
    by_part = {span.name: {str((event.attributes or {})["keepstep.span"]) for event in span.events} for span in spans}
    assert (by_part["keepstep.stop"], by_part["keepstep.reset"]) == ({"stop"}, {"reset"})
    assert {"restore", "wait"} < by_part["keepstep.restore"]


def test_recoveries_that_were_not_completed_say_so(overtaken: Recorded) -> None:
    run, spans = exported(overtaken.folder)
    first, second = roots(spans)
    assert (first.attributes or {})["keepstep.overtaken"] is True
    assert first.status.description == "another failure interrupted this recovery"
    assert second.status.description == "the job ended during this recovery"
    assert first.end_time == run.info.unix_ns(run.scenes[1].record.begun_s)
    assert first.context.trace_id != second.context.trace_id
    unfinished = [span for span in spans if span.status.description == "not completed"]
    assert unfinished
    assert all(span.end_time in (first.end_time, second.end_time) for span in unfinished)


def test_a_running_job_is_exported(tmp_path: Path) -> None:
    found = InMemorySpanExporter()
    with opentelemetry.exporting(tmp_path / "run", found) as companion:
        report = record(tmp_path / "run", *TINY, "--steps", NUM_STEPS, faults=KILL, companion=companion)
    assert report["exit_code"] == 0
    (root,) = roots(found.get_finished_spans())
    assert (root.attributes or {})["keepstep.cause"] == "signal"
    assert root.resource.attributes["service.name"] == "keepstep"


class Broken(SpanExporter):
    """Raises at whatever it is asked."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("it cannot")


class Silent(SpanExporter):
    """Never comes back from an export, until it is let go."""

    def __init__(self) -> None:
        self.is_asked, self.let_go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        self.let_go.wait()
        return SpanExportResult.FAILURE


def test_an_exporter_that_raises_ends_no_job(tmp_path: Path) -> None:
    with opentelemetry.exporting(tmp_path / "run", Broken()) as companion:
        report = record(tmp_path / "run", *TINY, "--steps", NUM_STEPS, faults=KILL, companion=companion)
    assert (report["exit_code"], len(report["recoveries"])) == (0, 1)


def test_an_exporter_that_hangs_is_left_behind(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opentelemetry, "FLUSH_S", 0.01)
    silent = Silent()
    made = opentelemetry.provider(silent)
    monkeypatch.setattr(opentelemetry, "provider", lambda _exporter: made)
    with opentelemetry.exporting(recorded.folder, silent):
        made.get_tracer("test").start_span("one").end()
    assert silent.is_asked.wait(60.0)
    assert "not everything was sent within" in capsys.readouterr().err
    silent.let_go.set()


def test_a_run_that_cannot_be_read_ends_no_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with opentelemetry.exporting(tmp_path / "another", InMemorySpanExporter()) as companion:
        report = record(tmp_path / "run", *TINY, companion=companion)
    assert report["exit_code"] == 0
    assert "recoveries are exported no more" in capfd.readouterr().err


def test_over_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``keepstep run --otel`` as a user starts it, and a collector that takes what comes."""
    received: list[ExportTraceServiceRequest] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "some training")
        monkeypatch.chdir(tmp_path)
        # Rank 0 kills itself in step 5 as often as it comes there: two recoveries, then there is no process left.
        flags = ["--otel", *map(str, TINY[:2]), "--max-restarts", "0", str(TINY[2]), "--kill-at", "5"]
        assert cli.main(flags) == 76
        server.shutdown()
    services, names = set(), []
    for request in received:
        for resource in request.resource_spans:
            services |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
            names += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert services == {"some training"}
    assert names.count("keepstep.recovery") == 2


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keepstep.integrations.opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"--otel: OpenTelemetry is not installed .*keepstep\[otel\]"):
        cli.main(["--otel", "--no-python", "true"])
