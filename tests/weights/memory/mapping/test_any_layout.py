"""From any trainer's layout to any engine's, with fused names: every bit is where gathering and torch.cat puts it."""

import pytest
import torch
from tests.weights.memory.delivery import Shipment, ship
from tests.weights.memory.mapping.models import MODELS, SIZES, Tensors, engine, model_of, random_state, trainer
from transformers import Phi3Config, Phi3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from keepstep.protocol.transfer.names import Chunk, Concat, Conversion, NameMap, NameRule, Select, Stack, fused_decoder
from keepstep.weights.memory.mapping.mapped import Mapped
from keepstep.weights.memory.targets import TensorTarget

PAIRS = [("TP 2", 1), ("whole", 2), ("TP 4", 2), ("FSDP 3", 2), ("HSDP 2", 1), ("PP 2", 1), ("PP 2", 2), ("FSDP 5", 2)]


def zeros_like(tensors: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, -7) for name, tensor in tensors.items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("layout", "tp_size"), PAIRS)
def test_a_trainer_serves_an_engine_with_fused_names(kind: str, layout: str, tp_size: int, seed: int) -> None:
    state = random_state(kind, seed)
    expected = [engine(state, rank, tp_size) for rank in range(tp_size)]
    engines = [zeros_like(each) for each in expected]
    names = NameMap(fused_decoder())
    targets = [
        TensorTarget(Mapped(own, names.for_rank(rank, tp_size)), atomic=rank == 0) for rank, own in enumerate(engines)
    ]
    sources = trainer(layout, state)
    shipment = ship(sources, targets)
    for found, each in zip(engines, expected, strict=True):
        assert_equal(found, each)
    replicated = sum(tensor.nbytes for tensor in state.values())
    assert shipment.num_bytes == replicated  # no byte travels twice to one device, though ranks overlap


@pytest.mark.parametrize("bucket_bytes", [16, 100, 1 << 16])
def test_the_rows_of_a_fused_tensor_may_come_in_any_buckets(bucket_bytes: int, seed: int) -> None:
    state = random_state("Qwen2", seed)
    own = zeros_like(engine(state, 0, 1))
    ship(trainer("FSDP 3", state), [TensorTarget(Mapped(own, NameMap(fused_decoder())), atomic=True)], bucket_bytes)
    assert_equal(own, engine(state, 0, 1))


def test_ranks_share_heads_where_there_are_fewer_heads_than_ranks(seed: int) -> None:
    """Four ranks, two heads of keys and values: each pair of ranks has the same one."""
    state = random_state("Llama", seed)
    for rank in range(4):
        attention = "model.layers.0.self_attn."
        shape = (4 + 4 + 4, SIZES["hidden_size"])
        own = {f"{attention}qkv_proj.weight": torch.zeros(shape)}
        ship([state], [TensorTarget(Mapped(own, NameMap(fused_decoder(kv_replicas=2), rank, 4)), atomic=False)])
        q, k, v = (state[f"{attention}{each}_proj.weight"] for each in "qkv")
        expected = torch.cat([q.chunk(4)[rank], k.chunk(2)[rank // 2], v.chunk(2)[rank // 2]])
        assert torch.equal(own[f"{attention}qkv_proj.weight"], expected)


def test_a_llama_is_what_a_model_with_fused_projections_computes(seed: int) -> None:
    """Phi-3 is Llama with qkv_proj and gate_up_proj: the same logits come out."""
    torch.manual_seed(seed)
    llama = model_of("Llama").eval()
    phi = Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0, rms_norm_eps=llama.config.rms_norm_eps)).eval()
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 9))
    with torch.no_grad():
        assert not torch.allclose(phi(tokens).logits, llama(tokens).logits)
        ship([llama], [TensorTarget(Mapped(phi, NameMap(fused_decoder())), atomic=True)])
        torch.testing.assert_close(phi(tokens).logits, llama(tokens).logits)


# ---- Against the conversions of transformers ------------------------------------------------------------------------

NUM_EXPERTS = 4
EXPERTS = "model.layers.{layer}.mlp.experts"
UNSTACKED = NameMap(
    (
        NameRule(f"{EXPERTS}.{{expert}}.down_proj.weight", Select(f"{EXPERTS}.down_proj", 0, "{expert}")),
        *(
            NameRule(
                f"{EXPERTS}.{{expert}}.{part}_proj.weight",
                Chunk(Select(f"{EXPERTS}.gate_up_proj", 0, "{expert}"), 0, number, 2),
            )
            for number, part in enumerate(("gate", "up"))
        ),
    )
)


def of_each(part: str) -> Stack:
    return Stack(tuple(f"{EXPERTS}.{expert}.{part}_proj.weight" for expert in range(NUM_EXPERTS)))


STACKED = NameMap(
    (
        NameRule(f"{EXPERTS}.down_proj", of_each("down")),
        NameRule(f"{EXPERTS}.gate_up_proj", Concat((of_each("gate"), of_each("up")), 1)),
    )
)


def mixture(seed: int) -> tuple[Tensors, Tensors]:
    """A model of transformers with its experts stacked, and the names and tensors of its checkpoint."""
    torch.manual_seed(seed)
    sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    return state, {name: tensor.clone() for name, tensor in revert_weight_conversion(model, dict(state)).items()}


@pytest.mark.parametrize("layout", ["whole", "FSDP 3", "PP 2"])
@pytest.mark.parametrize("who", ["consumer", "publisher"])
def test_experts_come_apart_as_transformers_saves_them(layout: str, who: str, seed: int) -> None:
    state, saved = mixture(seed)
    own, sources = zeros_like(saved), trainer(layout, state)
    if who == "consumer":
        ship(sources, [TensorTarget(Mapped(own, UNSTACKED), atomic=True)])
    else:
        rules = [
            NameRule(rule.to.replace("{expert}", str(expert)), rule_for(rule, expert))
            for rule in UNSTACKED.rules
            for expert in range(NUM_EXPERTS)
        ]
        ship([Mapped(each, NameMap(tuple(rules))) for each in sources], [TensorTarget(own, atomic=True)])
    assert_equal(own, saved)


def rule_for(rule: NameRule, expert: int) -> Chunk | Select:
    """Its recipe for one expert: a publisher's names do not say how many there are."""
    match rule.recipe:
        case Select(of=of, dim=dim):
            return Select(of, dim, expert)
        case Chunk(of=Select(of=of), index=index):
            return Chunk(Select(of, 0, expert), 0, index, 2)
    raise AssertionError(rule)


@pytest.mark.parametrize("layout", ["whole", "FSDP 3", "PP 2"])
@pytest.mark.parametrize("who", ["consumer", "publisher"])
def test_experts_are_stacked_as_transformers_loads_them(layout: str, who: str, seed: int) -> None:
    state, saved = mixture(seed)
    own, sources = zeros_like(state), trainer(layout, saved)
    if who == "consumer":
        ship(sources, [TensorTarget(Mapped(own, STACKED), atomic=True)])
    else:
        ship([Mapped(each, STACKED) for each in sources], [TensorTarget(own, atomic=True)])
    assert_equal(own, state)


# ---- Dtypes ---------------------------------------------------------------------------------------------------------


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


CASTS = NameMap(fused_decoder(), convert=Conversion.CAST)


def test_a_smaller_dtype_is_cast_at_the_source_and_half_the_bytes_travel(seed: int) -> None:
    state = random_state("Llama", seed)
    expected = in_dtype(engine(state, 0, 1), torch.bfloat16)
    own = [zeros_like(expected) for _ in range(2)]
    shipment = ship(trainer("FSDP 3", state), [TensorTarget(Mapped(each, CASTS), atomic=True) for each in own])
    for each in own:
        assert_equal(each, expected)
    assert shipment.num_bytes == sum(tensor.nbytes for tensor in state.values()) / 2


@pytest.mark.parametrize("other", [torch.float32, torch.float16])
def test_if_two_dtypes_are_wanted_the_published_one_travels_once(other: torch.dtype, seed: int) -> None:
    state = random_state("Llama", seed)
    dtypes = (torch.bfloat16, other)
    own = [zeros_like(in_dtype(engine(state, 0, 1), dtype)) for dtype in dtypes]
    shipment = ship(trainer("TP 2", state), [TensorTarget(Mapped(each, CASTS), atomic=True) for each in own])
    for each, dtype in zip(own, dtypes, strict=True):
        assert_equal(each, in_dtype(engine(state, 0, 1), dtype))
    assert shipment.num_bytes == sum(tensor.nbytes for tensor in state.values())


def test_a_larger_dtype_is_cast_by_the_consumer(seed: int) -> None:
    state = in_dtype(random_state("Llama", seed), torch.bfloat16)
    own = zeros_like(in_dtype(engine(state, 1, 2), torch.float32))
    shipment = Shipment([state], [TensorTarget(Mapped(own, CASTS.for_rank(1, 2)), atomic=True)], 100)
    assert shipment.layout.casts == ()
    shipment.bring()
    assert_equal(own, in_dtype(engine(state, 1, 2), torch.float32))
