"""Names of wrapped models, as an engine knows them."""

import pytest

from keepstep.engines.names import plain_names
from keepstep.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("module._orig_mod.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.layers.0.weight", "layers.0.weight"),
        ("_forward_module.layers.0.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("base_model.model.layers.0.base_layer.weight", "layers.0.weight"),
        ("module.base_model.model.layers.0.base_layer.weight", "layers.0.weight"),
    ],
)
def test_wrappers_are_removed(name: str, plain: str) -> None:
    assert plain_names([name]) == {name: plain}


def test_a_model_may_have_a_part_named_module() -> None:
    """DDP's prefix stands in front of all names."""
    names = ["module.weight", "head.weight"]
    assert plain_names(names) == {name: name for name in names}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.default.weight"],
            r"lora_A.*merge_and_unload",
        ),
        (["base_model.model.head.modules_to_save.default.weight"], "belongs to an adapter"),
        (["_fsdp_wrapped_module._flat_param"], "use_orig_params=True"),
        (["_orig_mod.a.weight", "a.weight"], r"'_orig_mod\.a\.weight' and 'a\.weight' are both 'a\.weight'"),
    ],
)
def test_what_no_engine_can_load_is_refused_by_name(names: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plain_names(names)
