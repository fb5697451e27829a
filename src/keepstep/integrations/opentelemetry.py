"""OpenTelemetry: exports each recovery of a job as a trace, over OTLP to the endpoint in the ``OTEL_*`` variables.

Needs the extra ``otel``. A recovery is a span ``keepstep.recovery`` from the failure to the first step afterwards. The
parts of the recovery are child spans, and the activities of each rank are events of these spans. Each committed update
of published weights is a span ``keepstep.weights.update``. If several updates are committed between two polls, only
the newest is exported.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

import keepstep
from keepstep.errors import KeepstepError
from keepstep.launcher.job import Companion, Job
from keepstep.trace.record.runfolder import RunInfo
from keepstep.trace.timeline.finished import FinishedScenes
from keepstep.trace.timeline.run import Run
from keepstep.trace.timeline.scene import LABELS, Scene, SceneSpan, SpanKind
from keepstep.trace.weights.publications import Publication

POLL_INTERVAL_S = 1.0
"""Interval between two polls for recoveries. A collector shows them some seconds later in any case."""
FLUSH_S = 5.0
"""How long to wait at the end of the job for unsent spans. The exporter drops them after this time."""

_PART_OF = {SpanKind.STOP: "stop", SpanKind.DECIDE: "decide", SpanKind.RESET: "reset"}
"""The part of the recovery that a rank's span belongs to; all other spans belong to the restoration."""


def provider(exporter: SpanExporter | None = None) -> TracerProvider:
    """Creates a tracer provider with a queue of spans and a thread that exports them.

    Args:
        exporter: the exporter; by default OTLP, configured by the ``OTEL_*`` variables.
    """
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # the SDK's word for: not set
        resource = resource.merge(Resource({SERVICE_NAME: "keepstep"}))
    # Not at exit: it would wait as long as its exporter does.
    made = TracerProvider(resource=resource, shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter() if exporter is None else exporter))
    return made


@contextlib.contextmanager
def exporting(run_dir: Path, exporter: SpanExporter | None = None) -> Iterator[Companion]:
    """Yields a companion that exports the recoveries of the job in ``run_dir``. On exit it sends the remaining spans.

    A failure of the exporter does not affect the job.
    """
    spans_of = provider(exporter)
    tracer = spans_of.get_tracer("keepstep", keepstep.__version__)

    async def accompany(_job: Job) -> None:
        await _follow(run_dir, tracer)

    try:
        yield accompany
    finally:
        # In a daemon thread: an exporter without an answer may block for longer than the user wants to wait.
        sending = threading.Thread(target=spans_of.shutdown, name="keepstep-otel", daemon=True)
        sending.start()
        sending.join(FLUSH_S)
        if sending.is_alive():
            _complain(f"not everything was sent within {FLUSH_S:g} s")


async def _follow(run_dir: Path, tracer: Tracer) -> None:
    try:
        run = Run(run_dir)
        finished, updates = FinishedScenes(run), NewUpdates(run)
        try:
            while True:
                _export_new(run, finished, updates, tracer)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            _export_new(run, finished, updates, tracer, is_over=True)
            run.close()
    except (KeepstepError, OSError) as error:
        _complain(str(error))
    except Exception as error:  # an exporter's hooks and the SDK may raise anything; the job goes on without
        _complain(repr(error))


class NewUpdates:
    """The newest committed update of each weights folder, if it has not been exported yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, tuple[int, int]] = {}

    def take(self, is_over: bool = False) -> Iterator[Publication]:
        """Yields the new updates that all devices have reported. With ``is_over`` it yields incomplete ones as well."""
        for folder, publication in self._run.publications.found.items():
            is_whole = is_over or len(publication.last_devices) == len(publication.devices)
            if publication.last is not None and is_whole and self._seen.get(folder) != publication.last:
                self._seen[folder] = publication.last
                yield publication


def _export_new(run: Run, finished: FinishedScenes, updates: NewUpdates, tracer: Tracer, is_over: bool = False) -> None:
    run.poll()
    for scene in finished.take(is_over):
        export(scene, run, tracer)
    for publication in updates.take(is_over):
        export_update(publication, run, tracer)


def _complain(what: str) -> None:
    print(f"keepstep: --otel: recoveries are exported no more: {what}", file=sys.stderr, flush=True)


def export(scene: Scene, run: Run, tracer: Tracer) -> None:
    """Creates the spans of a completed recovery.

    Args:
        scene: the recovery.
        run: the run that it belongs to.
        tracer: creates the spans.
    """
    info, record = run.info, scene.record
    end_s = scene.end_s if scene.end_s is not None else max(run.now_s, record.begun_s)
    root = tracer.start_span(
        "keepstep.recovery",
        context=trace.set_span_in_context(trace.INVALID_SPAN),  # a trace of its own
        start_time=info.unix_ns(scene.since_s),
        attributes=_attributes(scene, info),
    )
    if scene.overtaken_s is not None:
        root.set_status(Status(StatusCode.ERROR, "another failure interrupted this recovery"))
    elif record.resumed_s is None:
        root.set_status(Status(StatusCode.ERROR, "the job ended during this recovery"))
    inside = trace.set_span_in_context(root)
    of_ranks: dict[str, list[SceneSpan]] = {}
    for each in scene.spans():
        of_ranks.setdefault(_PART_OF.get(each.kind, "restore"), []).append(each)
    for part, part_begin_s, part_end_s in record.parts():
        if part == "gap" or part_begin_s is None:
            continue
        child = tracer.start_span(f"keepstep.{part}", context=inside, start_time=info.unix_ns(part_begin_s))
        for each in of_ranks.get(part, []):
            child.add_event(f"rank {each.rank}: {LABELS[each.kind]}", _event(each, end_s), info.unix_ns(each.begin_s))
        if part_end_s is None:
            child.set_status(Status(StatusCode.ERROR, "not completed"))
        child.end(info.unix_ns(end_s if part_end_s is None else part_end_s))
    root.end(info.unix_ns(end_s))


def export_update(publication: Publication, run: Run, tracer: Tracer) -> None:
    """Creates the span of the last committed update. The consumers that did not get the update are its events.

    Args:
        publication: a publication with a committed update.
        run: the run that it belongs to.
        tracer: creates the span.
    """
    info, devices = run.info, publication.last_devices
    begun_s = min(device.committed_span_s[0] for device in devices.values())
    ended_s = max(device.committed_span_s[1] for device in devices.values())
    span = tracer.start_span(
        "keepstep.weights.update",
        context=trace.set_span_in_context(trace.INVALID_SPAN),  # a trace of its own
        start_time=info.unix_ns(begun_s),
        attributes={
            "keepstep.run": info.run,
            "keepstep.weights.folder": publication.folder,
            "keepstep.weights.version": publication.version or 0,
            "keepstep.weights.devices": len(devices),
            "keepstep.weights.consumers": sum(len(device.consumers) for device in devices.values()),
            "keepstep.weights.sent_bytes": publication.last_bytes,
            "keepstep.weights.unchanged_bytes": sum(device.unchanged_bytes for device in devices.values()),
        },
    )
    for failure in publication.failures:
        if failure.version == publication.version:
            span.add_event(failure.text, timestamp=info.unix_ns(failure.at_s))
    span.end(info.unix_ns(ended_s))


def _attributes(scene: Scene, info: RunInfo) -> dict[str, AttributeValue]:
    record = scene.record
    attributes: dict[str, AttributeValue | None] = {
        "keepstep.run": info.run,
        "keepstep.generation": record.generation,
        "keepstep.cause": str(record.cause),
        "keepstep.detail": record.detail,
        "keepstep.ranks": [failure.rank for failure in record.failures],
        "keepstep.nodes": sorted({scene.places[f.rank][1] for f in record.failures if f.rank in scene.places}),
        "keepstep.world_size": info.settings.world_size,
        "keepstep.resume_step": record.resume_step,
        "keepstep.steps_recomputed": record.steps_recomputed,
        "keepstep.restored_bytes": record.received_bytes,
        "keepstep.overtaken": scene.overtaken_s is not None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _event(span: SceneSpan, end_s: float) -> dict[str, AttributeValue]:
    until_s = end_s if span.end_s is None else span.end_s
    return {
        "keepstep.rank": span.rank,
        "keepstep.span": str(span.kind),
        "keepstep.duration_ms": round((until_s - span.begin_s) * 1000, 3),
    }
