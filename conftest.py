"""Leaves out of collection what cannot be imported here."""

from importlib.util import find_spec

_VLLM = find_spec("vllm")  # without it, a directory of that name may be found

# Imported by vLLM alone; its tests run in the environment of `make vllm-env`.
collect_ignore = ["src/syncline/vllm/engine.py"] if _VLLM is None or _VLLM.origin is None else []
