"""A custom weight loader for tests: it changes nothing, and says what a rank derived from its weights."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "sglang_probe.derived"
FILE = "derived.json"
_DERIVED = ("w_kc", "w_vc")


def derived(model: Any, _: object) -> None:
    """Write the digests of MLA's absorbed projections, by module, into the staging directory."""
    import torch

    found = {}
    for prefix, module in model.named_modules():
        for name in _DERIVED:
            tensor = getattr(module, name, None)
            if tensor is not None:
                bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[f"{prefix}.{name}"] = hashlib.sha256(bits).hexdigest()
    target = Path(os.environ["SYNCLINE_SGLANG_STAGING"]) / FILE
    target.write_text(json.dumps(found))
