"""Messages about published weights, for tests of the views that show them."""

from __future__ import annotations

import shutil
from pathlib import Path

from keepstep.protocol.messages import PublicationStage, StageSpan, WeightsObserved
from keepstep.trace.record import runfolder
from keepstep.trace.weights.publications import Publications

FOLDER = "/run/weights"
SPANS = tuple(
    StageSpan(stage, bucket, 0.1 * bucket + begin_s, 0.1 * bucket + begin_s + 0.1)
    for bucket in range(3)
    for stage, begin_s in (("h2d", 0.0), ("broadcast", 0.1), ("reload", 0.2))
)


def news(
    rank: int,
    stage: PublicationStage,
    version: int | None,
    at_s: float,
    consumers: tuple[tuple[str, int | None], ...] = (),
    failures: tuple[str, ...] = (),
    generation: int = 1,
) -> WeightsObserved:
    """Returns a message of a rank whose worker has the same number. An update takes half a second and sends 1 GB from
    each rank."""
    is_sent = stage is PublicationStage.COMMITTED
    begun_s = at_s if stage is PublicationStage.UNDER_WAY else at_s - 0.5
    sent_bytes, spans = (10**9, SPANS) if is_sent else (0, ())
    return WeightsObserved(
        rank, rank, generation, FOLDER, stage, version, begun_s, at_s, sent_bytes, 0, consumers, failures, spans
    )


def told_of() -> Publications:
    """Returns the state of three versions of two ranks, an interrupted one and one in progress. A consumer on another
    node lags behind, and one was lost."""
    found = Publications()
    for version, at_s in ((1, 1.0), (2, 2.0), (3, 3.0)):
        lagging = (("engine-1/slow", 1), ("engine-1/quick", version))
        lost = ("engine-1/dead: has shown nothing for 3 s",) if version == 2 else ()
        found.take("a", news(0, PublicationStage.COMMITTED, version, at_s, (("near", version),)))
        found.take("b", news(1, PublicationStage.COMMITTED, version, at_s, lagging, lost))
    for rank, node in ((0, "a"), (1, "b")):
        text = "version 4 was not published: rank 1: is gone"
        consumers = found.found[FOLDER].devices[rank].consumers
        found.take(node, news(rank, PublicationStage.BROKEN_OFF, 4, 4.0, consumers, (text,)))
        found.take(node, news(rank, PublicationStage.UNDER_WAY, 5, 5.0, consumers))
    return found


def published_run(recorded: Path, folder: Path) -> Path:
    """Returns a copy of a recorded run, in which the ranks have also published weights."""
    shutil.copytree(recorded, folder)
    told_of().write(folder / runfolder.WEIGHTS)
    return folder
