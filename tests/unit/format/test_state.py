"""The state file of a checkpoint directory: there and back, and strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_cases import draw, version_of
from syncline.errors import FormatError, SynclineError
from syncline.format import state
from syncline.format.state import DirectoryState
from syncline.version import HeldVersion, PartEntry

HELD = version_of(7, draw(1))
JOURNAL = PartEntry("journal", 1234, "ab" * 32)


def many_tensors() -> HeldVersion:
    """A version whose tensor table does not fit into the manifest."""
    from dataclasses import replace

    from syncline.types import TensorMeta
    from syncline.version import TensorEntry

    entry = HELD.manifest.tensors[0]
    table = tuple(
        TensorEntry(
            TensorMeta(f"layer.{number:04d}", "BF16", (2, 3)),
            entry.fingerprint,
            encoding="full",
            part=0,
            changed=None,
        )
        for number in range(100)
    )
    total = entry.fingerprint
    for _ in range(99):
        total += entry.fingerprint
    return HeldVersion(replace(HELD.manifest, tensors=table, fingerprint=total), "cd" * 32)


@pytest.mark.parametrize(
    "value",
    [
        DirectoryState("clean", HELD),
        DirectoryState("clean", None),
        DirectoryState("clean", many_tensors()),
        DirectoryState("creating", None),
        DirectoryState("applying", HELD, JOURNAL),
    ],
)
def test_there_and_back(value: DirectoryState, tmp_path: Path) -> None:
    text = state.dump(value)
    assert state.load(text) == value
    assert state.dump(state.load(text)) == text
    (tmp_path / ".syncline").mkdir()
    (tmp_path / ".syncline" / "state.json").write_bytes(text)
    assert state.read(tmp_path) == value
    assert value.is_changing == (value.status != "clean")


def test_no_state(tmp_path: Path) -> None:
    assert state.read(tmp_path) is None
    assert state.read(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    assert state.read(tmp_path / "file") is None


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(state.dump(DirectoryState("applying", HELD, JOURNAL)))
    change(document)
    return json.dumps(document).encode()


BAD: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": lambda document: document.update(format="syncline-head"),
    "format_version": lambda document: document.update(format_version=2),
    "status": lambda document: document.update(status="dirty"),
    "unknown key": lambda document: document.update(more=1),
    "missing key": lambda document: document.pop("held"),
    "clean with journal": lambda document: document.update(status="clean"),
    "applying without journal": lambda document: document.update(journal=None),
    "applying without version": lambda document: document.update(held=None),
    "journal size": lambda document: document["journal"].update(size_bytes=-1),
    "journal digest": lambda document: document["journal"].update(sha256="AB" * 32),
    "journal key": lambda document: document["journal"].update(path="x"),
    "held digest": lambda document: document["held"].update(sha256="0"),
    "held manifest": lambda document: document["held"].update(manifest="{}"),
    "held manifest of another kind": lambda document: document["held"].update(manifest={}),
    "held surrogate": lambda document: document["held"].update(manifest="\ud800"),
    "held sidecar": lambda document: document["held"].update(sidecar="AAAA"),
    "held base64": lambda document: document["held"].update(sidecar="A!"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_states_are_refused(kind: str) -> None:
    with pytest.raises(FormatError, match=r"state\.json"):
        state.load(edited(BAD[kind]))


def test_every_cut_is_refused() -> None:
    text = state.dump(DirectoryState("clean", None))
    for length in range(len(text) - 1):
        with pytest.raises(FormatError):
            state.load(text[:length])


def test_a_damaged_sidecar_is_refused() -> None:
    text = state.dump(DirectoryState("clean", many_tensors()))
    document = json.loads(text)
    document["held"]["sidecar"] = "AAAA" + document["held"]["sidecar"][4:]
    with pytest.raises(SynclineError):
        state.load(json.dumps(document).encode())


@pytest.mark.parametrize("sidecar", ["\ud800", "é", "a", "a b="])
def test_a_sidecar_that_is_not_base64_is_refused(sidecar: str) -> None:
    document = json.loads(state.dump(state.DirectoryState("clean", HELD)))
    document["held"]["sidecar"] = sidecar
    with pytest.raises(FormatError, match="held.sidecar is not base64"):
        state.load(json.dumps(document).encode())
