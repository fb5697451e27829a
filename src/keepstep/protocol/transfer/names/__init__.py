"""How a consumer's tensors are made of the published ones, as data: names, fused tensors, transposes, dtypes.

::

    from keepstep.protocol.transfer.names import Concat, NameMap, NameRule, Shard, fused_decoder

    names = NameMap(fused_decoder(), tp_rank=1, tp_size=2)
    keepstep.Subscriber(folder, into=keepstep.Mapped(engine, names))
"""

from keepstep.protocol.transfer.names.name_map import Conversion, NameMap, NameRule, Quantize
from keepstep.protocol.transfer.names.presets import fused_decoder
from keepstep.protocol.transfer.names.recipes import Chunk, Concat, Recipe, Select, Shard, Slice, Stack, Transpose

__all__ = [
    "Chunk",
    "Concat",
    "Conversion",
    "NameMap",
    "NameRule",
    "Quantize",
    "Recipe",
    "Select",
    "Shard",
    "Slice",
    "Stack",
    "Transpose",
    "fused_decoder",
]
