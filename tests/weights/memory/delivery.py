"""A whole version from sources to targets in one process: the same plans, copies and checksums, without processes."""

from collections.abc import Sequence

import torch

from keepstep.protocol.transfer.layout import Consumer, Layout, lay_out
from keepstep.protocol.transfer.plan import Limits
from keepstep.weights.device.stages import RankPlan
from keepstep.weights.memory.blocks import Weights
from keepstep.weights.memory.mapping.mapped import Mapped, published_blocks
from keepstep.weights.memory.pieces import SLOT_EXTRA_BYTES
from keepstep.weights.memory.targets import Target


class Shipment:
    """Sources and targets whose layout is agreed on; what does not fit is raised at once."""

    def __init__(self, sources: Sequence[Weights | Mapped], targets: Sequence[Target], bucket_bytes: int) -> None:
        blocks = [published_blocks(source) for source in sources]
        held = [[block.as_held() for block in each] for each in blocks]
        consumers = [Consumer(f"engine {number}", target.wants) for number, target in enumerate(targets)]
        self.targets = targets
        self.layout: Layout = lay_out(
            held, [consumers, *([] for _ in sources[1:])], Limits(bucket_bytes, bucket_bytes // 2)
        )
        for problem in self.layout.problems:
            if problem is not None:
                raise problem.error
        self._plans = [RankPlan(self.layout, rank) for rank in range(len(sources))]
        for plan, each in zip(self._plans, blocks, strict=True):
            plan.prepare([block.held for block in each])
        self._slots = [torch.zeros(bucket_bytes + SLOT_EXTRA_BYTES, dtype=torch.uint8) for _ in range(2)]

    @property
    def num_bytes(self) -> int:
        """What travels."""
        return sum(piece.num_bytes for bucket in self.layout.plan().buckets for piece in bucket.pieces)

    def bring(self) -> None:
        """A whole version to all targets, committed."""
        for target, reader in zip(self.targets, self.layout.readers, strict=True):
            target.prepare(self.layout, reader.parts)
        for plan in self._plans:
            for number, bucket in enumerate(plan.own):
                slot = self._slots[bucket.index % 2]
                checksum = plan.gather(number, slot)
                for reader in bucket.readers:
                    assert self.targets[reader].load(bucket, slot) == checksum
                slot.fill_(255)  # it is used again
        for target in self.targets:
            target.finish()
            target.commit()


def ship(sources: Sequence[Weights | Mapped], targets: Sequence[Target], bucket_bytes: int = 256) -> Shipment:
    """One whole version."""
    shipment = Shipment(sources, targets, bucket_bytes)
    shipment.bring()
    return shipment
