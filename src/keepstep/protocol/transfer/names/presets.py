"""Rules for families of models: from Hugging Face's names to those of an engine that fuses projections."""

from __future__ import annotations

from keepstep.protocol.transfer.names.name_map import NameRule
from keepstep.protocol.transfer.names.recipes import Concat, Shard


def fused_decoder(prefix: str = "model.", kv_replicas: int = 1) -> tuple[NameRule, ...]:
    """Rules for an engine with ``qkv_proj`` and ``gate_up_proj``, from Hugging Face's names, at any ``tp_size``.

    They fit Llama, Mistral, Qwen2 and Qwen3 (dense). As in Megatron, query, key, value, gate and up are sharded along
    their rows, ``o_proj`` and ``down_proj`` along their columns, and embeddings and ``lm_head`` along the vocabulary.
    Every rank has all of the norms and of the biases of ``o_proj`` and ``down_proj``.

    Args:
        prefix: the prefix before ``layers`` and ``embed_tokens``, on both sides.
        kv_replicas: how many ranks share a key-value head, if there are fewer such heads than ranks; else 1.
    """
    attention, mlp = f"{prefix}layers.{{layer}}.self_attn.", f"{prefix}layers.{{layer}}.mlp."
    replicas = {"q": 1, "k": kv_replicas, "v": kv_replicas}
    rules = []
    for kind in ("weight", "bias"):
        qkv = tuple(Shard(f"{attention}{each}_proj.{kind}", 0, num) for each, num in replicas.items())
        gate_up = tuple(Shard(f"{mlp}{each}_proj.{kind}", 0) for each in ("gate", "up"))
        rules += [
            NameRule(f"{attention}qkv_proj.{kind}", Concat(qkv)),
            NameRule(f"{mlp}gate_up_proj.{kind}", Concat(gate_up)),
        ]
    for name in (f"{attention}o_proj.weight", f"{mlp}down_proj.weight"):
        rules.append(NameRule(name, Shard(name, 1)))
    for name in (f"{prefix}embed_tokens.weight", "lm_head.weight"):
        rules.append(NameRule(name, Shard(name, 0)))
    return tuple(rules)
