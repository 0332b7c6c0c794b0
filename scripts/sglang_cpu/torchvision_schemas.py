"""Names two operators of torchvision before it is imported: its own library is built for CUDA's torch and cannot load.

With the names there, `import torchvision` succeeds beside a CPU build of torch; text models call neither.
A `.pth` file loads this at the start of every process, SGLang's own ones included; torch itself is
imported only where torchvision is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Define the operators when torchvision is looked for; find nothing."""
        if name == "torchvision" and self._library is None:
            import torch  # noqa: PLC0415 - not in every process

            self._library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                self._library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
