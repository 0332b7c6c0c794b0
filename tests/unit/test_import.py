"""Importing the package does nothing but import."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, os, sys, threading, logging
before = dict(os.environ), threading.active_count(), logging.root.handlers[:]
import syncline
after = dict(os.environ), threading.active_count(), logging.root.handlers[:]
heavy = ("torch", "transformers", "vllm", "gguf", "matplotlib", "rich", "click", "fastapi", "uvicorn")
print(json.dumps({"same": before == after, "heavy": [name for name in heavy if name in sys.modules]}))
"""


def test_import_has_no_side_effect_and_no_optional_import() -> None:
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == {"same": True, "heavy": []}
    assert out.stderr == ""
