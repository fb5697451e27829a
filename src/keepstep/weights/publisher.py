"""Publishing weights: one `Publisher` per device; together they serve all consumers."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import torch

from keepstep.cancel import CancelToken
from keepstep.errors import ConfigurationError, PeerLost, UsageError
from keepstep.weights.device.device import Device, Settings
from keepstep.weights.device.late_subscribers import LateSubscribers, PublishedCopy
from keepstep.weights.device.stages import RankPlan
from keepstep.weights.device.update import WeightUpdate
from keepstep.weights.device.verdicts import UpdateFailed, error_of
from keepstep.weights.memory.blocks import NamedBlock, Weights, copies_of, fingerprint
from keepstep.weights.memory.mapping.mapped import Mapped, ReturnedWeights, plain, published_blocks

DEFAULT_BUCKET_BYTES = 4 << 20
DEFAULT_DEADLINE_S = 30.0
MAX_VERSION = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Buffers:
    """Size and place of a publisher's buffers.

    Attributes:
        bucket_bytes: size of a bucket; a publisher's buffer holds four.
        device: device of the buffers: "cpu" for host memory, or the GPU (``cuda:0``) of the consumers. The device type
            must be the same on all ranks.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    device: str | torch.device = "cpu"


DEFAULT_BUFFERS = Buffers()


class Published:
    """The result of a publication.

    Attributes:
        version: the version, committed on every device.
        failures: errors that name the consumers on this device that did not get it; all others use it now.
        spans: the times at which this device's stages were busy.
        reloads: the times at which one consumer on this device loaded the first buckets, on its machine's clock.
        sent_bytes: bytes of this device's weights that were sent to at least one device.
        unchanged_bytes: bytes of this device's weights that were not sent, because all their consumers already have
            them.
    """

    def __init__(self, version: int, update: WeightUpdate) -> None:
        self.version, self.failures, self.spans = version, tuple(update.failures), update.spans
        self.reloads = update.reloads
        self.sent_bytes, self.unchanged_bytes = update.sent_bytes, update.unchanged_bytes


class Publisher:
    """One device's part in publishing weights to the consumers on it.

    All devices publish together, as in a collective: each calls `publish` with the same version. The publisher owns a
        buffer of four buckets, from its creation until `close`; it allocates a second one when a consumer first
        attaches late. On a GPU each is two buffers of two buckets. In addition it takes a few hundred bytes per tensor,
        and with ``copies`` the size of the weights. Use it from one thread at a time, except for `interrupt`.
    """

    def __init__(
        self,
        folder: str | Path,
        weights: Weights | Mapped | ReturnedWeights,
        *,
        rank: int = 0,
        world_size: int = 1,
        generation: int = 0,
        copies: bool = False,
        buffers: Buffers = DEFAULT_BUFFERS,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """Args:
        folder: the folder through which all devices and consumers on this node connect. It is created with access for
            this user only, if missing. Use a short path, because it contains sockets.
        weights: the weights that this device holds. The publisher only reads them. A name map maps them to the
            published tensors.
        rank, world_size: rank of this device, and number of devices that publish.
        generation: generation of the membership. A device or consumer with a higher generation refuses this publisher.
        copies: publish copies in host memory, so that the weights may change meanwhile, and consumers that attach late
            get the last version. The copies take as much memory as this device's weights.
        buffers: size and device of the buffers.
        deadline_s: time without progress after which a device or consumer counts as lost.

        Raises:
            ConfigurationError: an argument is invalid, or the buffers do not fit into memory.
        """
        device = torch.device(buffers.device)
        settings = Settings(Path(folder), rank, world_size, buffers.bucket_bytes, deadline_s, device)
        settings.limits  # noqa: B018  # raises ConfigurationError for an invalid bucket size
        self._weights, self._has_copies = weights, copies
        self._blocks = published_blocks(weights)
        self._fingerprint = fingerprint(plain(weights)[0])
        self._check_sizes(buffers.bucket_bytes)
        self._settings = settings
        self._copies = self._copies_of(self._blocks)
        self._plan: RankPlan | None = None
        self._changed = threading.Condition()
        self._is_publishing = False
        self._stop = CancelToken()
        self._late_subscribers = LateSubscribers(settings)
        self._device = Device(
            settings,
            generation,
            lambda attached, version: self._late_subscribers.came(self._device, attached, version),
            lambda connection, called: self._late_subscribers.serve(self._device, connection, called),
        )
        self._device.open()

    def _check_sizes(self, bucket_bytes: int) -> None:
        for block in self._blocks:
            if block.held.tensor.element_size() > bucket_bytes:
                raise ConfigurationError(f"bucket_bytes={bucket_bytes} holds no element of '{block.names[0]}'")

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Generation of the membership. It may be set between two publications."""
        return self._device.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._device.generation = generation

    @property
    def buffer_bytes(self) -> int:
        """Total size of the publisher's buffers in bytes."""
        return self._device.buffer_bytes + self._late_subscribers.buffer_bytes

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers attached to this device now."""
        return tuple(each.name for each in self._device.subscriber_registry.present())

    @property
    def consumer_versions(self) -> tuple[tuple[str, int | None], ...]:
        """The consumers attached to this device now, and the version that each is known to have. Any thread."""
        return self._device.subscriber_registry.versions()

    def wait_for_consumers(self, num_consumers: int, timeout_s: float) -> None:
        """Waits until this many consumers are attached to this device.

        Raises:
            PeerLost: they did not attach in time.
        """
        if not self._device.subscriber_registry.wait_for(num_consumers, timeout_s):
            there, rank = len(self.consumers), self._settings.rank
            raise PeerLost(f"{there} of {num_consumers} consumers came to rank {rank} in {timeout_s:g} s")

    # ---- what it does -----------------------------------------------------------------------------------------------

    def publish(self, version: int) -> Published:
        """Sends a version to all attached consumers, and returns when those of this device have switched to it.

        Without copies the weights must not change meanwhile. A consumer that fails is left out and named in the result.

        Args:
            version: number of the version, the same on all devices.

        Raises:
            UsageError: this publisher is publishing another version, or the version number is invalid.
            PublisherLost: a device is gone or stalled; no consumer has switched to this version.
            StateMismatch: the devices' layouts do not fit together.
            StaleGeneration: this publisher's generation is over, or another device publishes another version.
        """
        self._begin(version)
        return self._carry_out(version)

    def publish_in_background(self, version: int) -> Future[Published]:
        """Copies the weights, and publishes the copies in a thread. Once it returns the weights may change.

        Returns:
            What `publish` would return or raise.

        Raises:
            UsageError: this publisher has no copies, or is publishing another version.
        """
        if not self._has_copies:
            raise UsageError("publishing in the background needs a Publisher with copies=True")
        self._begin(version)
        future: Future[Published] = Future()

        def run() -> None:
            try:
                future.set_result(self._carry_out(version))
            except Exception as error:  # raised by future.result()
                future.set_exception(error)

        threading.Thread(target=run, name="keepstep-publish", daemon=True).start()
        return future

    def interrupt(self) -> None:
        """Aborts the current publication, if there is one. Any thread."""
        with self._changed:
            if self._is_publishing:
                self._stop.set()

    def close(self) -> None:
        """Ends all connections and frees the buffers. Consumers keep what they have, and wait for another publisher."""
        self.interrupt()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_publishing)
        self._late_subscribers.close()
        self._device.close()
        self._stop.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, version: int) -> None:
        """Marks the publisher as publishing, and copies the weights if it has copies."""
        if not 0 <= version <= MAX_VERSION:
            raise UsageError(f"version {version}: allowed are 0 to {MAX_VERSION}")
        with self._changed:
            if self._is_publishing:
                raise UsageError(f"version {version} cannot be published while another version is")
            self._is_publishing = True
        try:
            self._late_subscribers.forget()
            self._look_again()
            if self._has_copies:
                for block, copy in zip(self._blocks, self._copies, strict=True):
                    copy.held.tensor.copy_(block.held.tensor)
            elif gpus := {block.held.tensor.device for block in self._blocks if block.held.tensor.is_cuda}:
                for gpu in gpus:
                    torch.cuda.current_stream(gpu).synchronize()  # waits for the caller's pending kernels
        except BaseException:  # frees the publisher for another version
            self._end()
            raise

    def _copies_of(self, blocks: list[NamedBlock]) -> list[NamedBlock]:
        """The blocks to publish: the copies, or the weights themselves."""
        return copies_of(blocks, self._settings.buffers_on.type == "cuda") if self._has_copies else blocks

    def _look_again(self) -> None:
        """Registers the weights again if a tensor was replaced or has moved in memory."""
        now = fingerprint(plain(self._weights)[0])
        if now == self._fingerprint:
            return
        self._blocks, self._fingerprint, self._plan = published_blocks(self._weights), now, None
        self._check_sizes(self._settings.bucket_bytes)
        self._copies = self._copies_of(self._blocks)

    def _carry_out(self, version: int) -> Published:
        """Runs one update. Then the publisher can publish another version."""
        try:
            update = WeightUpdate(self._device, version, self._copies, self._stop)
            self._plan = update.run(self._plan)
            if self._has_copies:
                self._late_subscribers.keep(
                    self._device, PublishedCopy(version, self._plan.layout, self._copies), update.served
                )
            return Published(version, update)
        except UpdateFailed as failed:
            raise error_of(failed.notice, f"version {version} was not published") from None
        finally:
            self._end()

    def _end(self) -> None:
        """Marks the publisher as free, and clears a pending `interrupt`, which was for this publication."""
        self._late_subscribers.settle()
        with self._changed:
            self._is_publishing = False
            self._stop.clear()
            self._changed.notify_all()
