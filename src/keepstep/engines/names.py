"""The names of a model's tensors without those of its wrappers: an engine knows the names of the model itself."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.errors import ConfigurationError

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Parts of names by which a wrapper holds the wrapped module: `torch.compile`, FSDP, activation checkpointing,
Lightning Fabric."""
OUTER = ("module.", "base_model.model.")
"""What DDP, and what PEFT, put in front of all names."""
ADAPTER = ("lora_", "modules_to_save", "original_module", "prompt_encoder", "adapter_")
"""Beginnings of the parts of names that PEFT gives to what it adds to a model."""
FLAT = "_flat_param"
"""FSDP1's parameters, without ``use_orig_params``: several tensors in one."""


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Returns published name -> name without wrappers.

    Raises:
        ConfigurationError: a name belongs to an adapter of PEFT or to a flat parameter of FSDP1, which no engine can
            load as a part of its model; or two names become the same.
    """
    found: dict[str, str] = {}
    for name in names:
        parts = [part for part in name.split(".") if part not in WRAPPERS]
        if FLAT in parts:
            raise ConfigurationError(
                f"'{name}' is a flat parameter of FSDP: wrap with use_orig_params=True, or use FSDP2"
            )
        if any(part.startswith(ADAPTER) for part in parts):
            raise ConfigurationError(
                f"'{name}' belongs to an adapter of PEFT, and an engine loads weights of the model itself: publish a "
                "merged one (merge_and_unload)"
            )
        found[name] = ".".join(part for part in parts if part != "base_layer")
    for outer in OUTER * 2:  # in either order
        if found and all(name.startswith(outer) for name in found.values()):
            found = {name: plain.removeprefix(outer) for name, plain in found.items()}
    by_plain: dict[str, str] = {}
    for name, plain in found.items():
        if (other := by_plain.setdefault(plain, name)) != name:
            raise ConfigurationError(f"'{other}' and '{name}' are both '{plain}' without their wrappers")
    return found
