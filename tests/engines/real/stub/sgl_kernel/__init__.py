"""Stands in for the package of SGLang's kernels, which needs a GPU: whatever is called in it raises.

A server that finds it on its path computes by torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

__version__ = "0.4.10"


class Kernel:
    """A function, or a namespace of functions, that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self._name}.{name}")

    def __call__(self, *_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stand-in: this test has no kernels of SGLang")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below this package: an empty one, whose names are kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        _stand_in(module)


def _stand_in(module: types.ModuleType) -> None:
    def kernel(name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{module.__name__}.{name}")

    module.__dict__["__getattr__"] = kernel


sys.meta_path.insert(0, Finder())
_stand_in(sys.modules[__name__])
