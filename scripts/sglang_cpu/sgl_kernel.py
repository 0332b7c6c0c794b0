"""What SGLang imports of its compiled kernels, on a machine that has no build of them: names that cannot be called.

No CPU wheel of `sglang-kernel` is published. Without AMX, SGLang computes with torch's own operators and
only imports names from it, so a name that raises when it is called is enough; which one was called is in
the message. Installed by scripts/sglang_env.sh, used by tests alone.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"
__path__ = []


class _AbsentKernels(types.ModuleType):
    """A module in which every public name is a kernel that this machine does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _NAMES.get(name)
        if found is None:
            found = _absent(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _ScalarTypes:
    """Kinds of quantised scalars are keys of tables, never looked into: any distinct value does."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"scalar type {name}"


class _Submodules:
    """Finds `sgl_kernel.anything`."""

    @staticmethod
    def find_spec(name: str, *_: object, **__: object) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for every submodule of this package."""
        if not name.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(name, _Submodules, is_package=True)

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module of absent kernels."""
        return _AbsentKernels(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Make it a package, so that it has submodules of its own."""
        module.__path__ = []


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name}: a compiled kernel, which this machine has no build of")

    return kernel


_NAMES = {"scalar_types": _ScalarTypes(), "ScalarType": type("ScalarType", (), {})}
sys.meta_path.append(_Submodules)
sys.modules[__name__].__class__ = _AbsentKernels
