"""OpenTelemetry: each recovery of a job as a trace, sent over OTLP to wherever the ``OTEL_*`` variables say.

Needs the extra ``otel``. A recovery is a span ``keepstep.recovery`` from the failure to the first step afterwards; its
parts are spans below it, and what each rank was at in a part are the events of that part's span. Of published weights
each update that counts is a span ``keepstep.weights.update``; where several come between two looks, the newest.
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
"""Recoveries are looked for so often. A collector shows them seconds later in any case."""
FLUSH_S = 5.0
"""When the job has ended, what was not sent yet is waited for so long, and then given up."""

_PART_OF = {SpanKind.STOP: "stop", SpanKind.DECIDE: "decide", SpanKind.RESET: "reset"}
"""Which part a rank's span belongs to; all others to the restoration."""


def provider(exporter: SpanExporter | None = None) -> TracerProvider:
    """What spans go through: a queue, and a thread that sends them.

    Args:
        exporter: where to; by default over OTLP, as the ``OTEL_*`` variables say.
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
    """A companion of the job in ``run_dir`` that exports its recoveries; at the end, what is left is sent.

    Nothing that goes wrong with it touches the job.
    """
    spans_of = provider(exporter)
    tracer = spans_of.get_tracer("keepstep", keepstep.__version__)

    async def accompany(_job: Job) -> None:
        await _follow(run_dir, tracer)

    try:
        yield accompany
    finally:
        # In a thread that may be left behind: an exporter that gets no answer takes longer than a user wants to wait.
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
    """The updates of published weights that count and were not seen yet: of each folder the newest."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, tuple[int, int]] = {}

    def take(self, is_over: bool = False) -> Iterator[Publication]:
        """Those that all devices have told of; where nothing more is to come, also others."""
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
    """Makes the spans of a recovery that is over.

    Args:
        scene: the recovery.
        run: that it belongs to.
        tracer: that makes them.
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
    """Makes the span of the last update that counts; consumers that were left out are its events.

    Args:
        publication: that has one.
        run: that it belongs to.
        tracer: that makes it.
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
