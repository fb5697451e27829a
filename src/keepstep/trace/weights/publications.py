"""The state of published weights, by folder: versions, consumers, failures and speed, from the ranks' reports.

The controller keeps this state in memory and writes all of it up to a few times a second, so its size is bounded. It
contains totals since the start, and only the newest of everything else. Times are seconds on the job's clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from keepstep.protocol.messages import PublicationStage, StageSpan, WeightsObserved, printable
from keepstep.trace.targets import write_whole

MAX_FAILURES = 20
"""Number of newest failures that are kept."""
MAX_COMMITS = 256
"""Number of newest versions whose times are kept. For a consumer that is further behind, the lag is a lower bound."""


class PublicationFailure(msgspec.Struct, frozen=True):
    """A consumer that was left out, or an update that was aborted. ``text`` names the process that caused it."""

    at_s: float
    version: int | None
    text: str


class PublishingDevice(msgspec.Struct):
    """The last report of one publishing rank."""

    node: str
    stage: PublicationStage = PublicationStage.ATTACHED
    version: int | None = None
    begun_s: float = 0.0
    committed: tuple[int, int] | None = None
    """Generation and version of the last update that this rank committed."""
    committed_span_s: tuple[float, float] = (0.0, 0.0)
    """Start and end of that update."""
    sent_bytes: int = 0
    """Bytes that the rank sent in that update. ``unchanged_bytes`` and ``spans`` are of the same update."""
    unchanged_bytes: int = 0
    spans: tuple[StageSpan, ...] = ()
    consumers: tuple[tuple[str, int | None], ...] = ()


class Publication(msgspec.Struct):
    """The weights that are published in one folder."""

    folder: str
    devices: dict[int, PublishingDevice] = msgspec.field(default_factory=dict)
    """rank -> its last report."""
    commits: list[tuple[int, float]] = msgspec.field(default_factory=list)
    """The newest versions, each with the time of its first commit report, oldest first."""
    last: tuple[int, int] | None = None
    """Generation and version of the last committed update."""
    num_committed: int = 0
    num_broken_off: int = 0
    broken_off: tuple[int, int] | None = None
    num_lost_consumers: int = 0
    sent_bytes: int = 0
    unchanged_bytes: int = 0
    seconds: float = 0.0
    """Total duration of the committed updates, each as measured by the first device that reported its commit."""
    failures: list[PublicationFailure] = msgspec.field(default_factory=list)

    def take(self, node: str, news: WeightsObserved) -> None:
        """Processes the report of a rank.

        Args:
            node: the rank's node.
            news: the report.
        """
        device = self.devices.setdefault(news.rank, PublishingDevice(node))
        device.node, device.consumers = node, news.consumers
        if news.version is None:
            return  # a report on consumers only; an update may be running
        device.stage, device.version, device.begun_s = news.stage, news.version, news.begun_s
        update = (news.generation, news.version)
        match news.stage:
            case PublicationStage.COMMITTED:
                device.committed, device.committed_span_s = update, (news.begun_s, news.at_s)
                device.sent_bytes, device.unchanged_bytes = news.sent_bytes, news.unchanged_bytes
                device.spans = news.spans
                self.sent_bytes += news.sent_bytes
                self.unchanged_bytes += news.unchanged_bytes
                self.num_lost_consumers += len(news.failures)
                self._fail(news)
                if update != self.last:
                    self.last, self.num_committed = update, self.num_committed + 1
                    self.seconds += news.at_s - news.begun_s
                    self.commits = [*self.commits, (news.version, news.at_s)][-MAX_COMMITS:]
            case PublicationStage.BROKEN_OFF if update != self.broken_off:
                self.broken_off, self.num_broken_off = update, self.num_broken_off + 1
                self._fail(news)
            case _:
                pass

    def _fail(self, news: WeightsObserved) -> None:
        found = [PublicationFailure(news.at_s, news.version, text) for text in news.failures]
        self.failures = [*self.failures, *found][-MAX_FAILURES:]

    # ---- what it comes to -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The last committed version; None if there is none."""
        return None if self.last is None else self.last[1]

    @property
    def under_way(self) -> tuple[int, float] | None:
        """The version of the running update, and its start time; None if no update runs."""
        busy = [device for device in self.devices.values() if device.stage is PublicationStage.UNDER_WAY]
        if not busy:
            return None
        newest = max(busy, key=lambda device: device.begun_s)
        return (newest.version, newest.begun_s) if newest.version is not None else None

    @property
    def last_devices(self) -> dict[int, PublishingDevice]:
        """The devices that have reported the last committed update, by rank."""
        if self.last is None:
            return {}
        return {rank: each for rank, each in sorted(self.devices.items()) if each.committed == self.last}

    @property
    def last_seconds(self) -> float | None:
        """Duration of the last committed update, from the first device's start to the last one's end."""
        spans = [device.committed_span_s for device in self.last_devices.values()]
        return max(end_s for _, end_s in spans) - min(begun_s for begun_s, _ in spans) if spans else None

    @property
    def last_bytes(self) -> int:
        """Bytes sent in the last committed update. Each byte counts once, for any number of consumers."""
        return sum(device.sent_bytes for device in self.last_devices.values())

    @property
    def last_bytes_per_s(self) -> float | None:
        """`last_bytes` divided by `last_seconds`; None if the duration is not known or 0."""
        return self.last_bytes / self.last_seconds if self.last_seconds else None

    def consumers(self) -> dict[str, list[int | None]]:
        """Returns node -> versions of its consumers. A consumer on another node has that node's name in its own."""
        found: dict[str, list[int | None]] = {}
        for device in self.devices.values():
            for name, version in device.consumers:
                node, slash, _ = name.partition("/")
                found.setdefault(node if slash else device.node, []).append(version)
        return found

    def lag(self, version: int | None, now_s: float) -> tuple[int, float]:
        """Returns a consumer's lag: the number of newer versions, and the seconds since the first of their commits.

        Args:
            version: the consumer's version; None if it has none.
            now_s: the present time.
        """
        versions = [each for each, _ in self.commits]
        at = len(versions) - 1 - versions[::-1].index(version) if version in versions else -1
        missed = self.commits[at + 1 :]
        return len(missed), now_s - missed[0][1] if missed else 0.0

    def worst_lag(self, versions: list[int | None], now_s: float) -> tuple[int, float]:
        """Returns the lag of the slowest of several consumers; (0, 0.0) if there are none."""
        return max((self.lag(version, now_s) for version in versions), default=(0, 0.0))


class Publications(msgspec.Struct):
    """Everything that a job publishes, by folder."""

    found: dict[str, Publication] = msgspec.field(default_factory=dict)

    def take(self, node: str, news: WeightsObserved) -> None:
        """Processes the report of a rank on a node."""
        self.found.setdefault(news.folder, Publication(news.folder)).take(node, news)

    def write(self, path: Path) -> None:
        """Writes everything to a file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(path, msgspec.json.encode(self), is_private=True)

    @classmethod
    def read(cls, path: Path) -> Publications:
        """Reads a file of `write`. Returns an empty object if it does not exist or does not parse."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError, RecursionError):
            return cls()


def describe_publication(publication: Publication, now_s: float) -> dict[str, Any]:
    """Describes one publication as plain data, for the page, `keepstep status` and programs.

    Ages are in seconds before ``now_s``.
    """
    under_way, seconds, rate = publication.under_way, publication.last_seconds, publication.last_bytes_per_s
    nodes = []
    for node, versions in sorted(publication.consumers().items()):
        lag_versions, lag_s = publication.worst_lag(versions, now_s)
        nodes.append({"node": node, "consumers": len(versions), "lag_versions": lag_versions, "lag_s": round(lag_s, 3)})
    behind, behind_s = publication.worst_lag([v for each in publication.consumers().values() for v in each], now_s)
    return {
        "folder": publication.folder,
        "version": publication.version,
        "age_s": round(now_s - publication.commits[-1][1], 3) if publication.commits else None,
        "under_way": under_way and under_way[0],
        "under_way_s": under_way and round(now_s - under_way[1], 3),
        "consumers": sum(len(versions) for versions in publication.consumers().values()),
        "lag_versions": behind,
        "lag_s": round(behind_s, 3),
        "nodes": nodes,
        "seconds": None if seconds is None else round(seconds, 6),
        "bytes": publication.last_bytes,
        "unchanged_bytes": sum(device.unchanged_bytes for device in publication.last_devices.values()),
        "bytes_per_s": None if rate is None else round(rate),
        "committed": publication.num_committed,
        "broken_off": publication.num_broken_off,
        "lost_consumers": publication.num_lost_consumers,
        "failures": [
            {"age_s": round(now_s - each.at_s, 3), "version": each.version, "text": each.text}
            for each in reversed(publication.failures)
        ],
    }


def publication_text(described: dict[str, Any]) -> str:
    """Formats the result of `describe_publication` as one line."""
    parts = [f"weights in {described['folder']}:"]
    parts.append("no version yet" if described["version"] is None else f"version {described['version']}")
    if described["under_way"] is not None:
        parts.append(f"({described['under_way']} under way)")
    num_nodes = len(described["nodes"])
    where = f" on {num_nodes} nodes" if num_nodes > 1 else ""
    parts.append(f"{described['consumers']} consumer{'' if described['consumers'] == 1 else 's'}{where}")
    if described["lag_versions"]:
        parts.append(f"up to {described['lag_versions']} behind for {described['lag_s']:.1f} s")
    if described["bytes_per_s"]:
        parts.append(f"last {gigabytes(described['bytes'])} at {gigabytes(described['bytes_per_s'])}/s")
    for name, what in (("broken_off", "broken off"), ("lost_consumers", "left out")):
        if described[name]:
            parts.append(f"{described[name]} {what}")
    first, second, *rest = parts
    return printable(f"{first} {second}" + "".join(f"{' ' if part.startswith('(') else ', '}{part}" for part in rest))


def gigabytes(num_bytes: int) -> str:
    """Formats a number of bytes in GB (10^9 bytes), or below 0.1 GB in MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
