"""Has the tests import the code that they lie beside, and leaves out of collection what cannot be imported here."""

import sys
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path(__file__).parent / "src"
_FOUND = find_spec("syncline")
if _FOUND is None or _FOUND.origin is None or not Path(_FOUND.origin).is_relative_to(_SOURCE):
    # An editable install of another checkout goes before every path, and would be tested in place of this one.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
    sys.path.insert(0, str(_SOURCE))

_VLLM = find_spec("vllm")  # without it, a directory of that name may be found

# Run in the environment of `make last-hop-env`, as a program.
collect_ignore = ["tests/last_hop/cpu_stub.py"]
if _VLLM is None or _VLLM.origin is None:
    # Imported by vLLM alone; its tests run in the environment of `make vllm-env`.
    collect_ignore.append("src/syncline/vllm/engine.py")
