"""Directories that were written without Syncline are read bit for bit, version by version."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from layout_reading import apply, assert_same, load
from syncline import Receiver, interchange
from syncline.engines import CheckpointDir
from syncline.stores import FilesystemStore

LAYOUTS = Path(__file__).parent / "layouts"
NAMES = sorted(path.name for path in LAYOUTS.iterdir() if not path.name.endswith(".expected"))
CHAINS = {
    "trl": (["step_000004", "step_000005", "step_000006", "step_000007"], "fddd"),
    "grail": (["100", "130", "160", "190"], "fddd"),
    "skyrl": (["00000001", "00000002", "00000003"], "ddd"),
    "fireworks": (["snap-8", "snap-9", "snap-10", "snap-11"], "fddd"),
}


def test_every_layout_has_its_golden_directories():
    assert len(NAMES) == 9
    assert {name.partition("-")[0] for name in NAMES} == CHAINS.keys()


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def expected(name: str, identity: str) -> Path:
    return LAYOUTS / f"{name}.expected" / f"{identity}.safetensors"


def test_golden_directories_are_recognised_and_their_chain_is_found(name):
    store = FilesystemStore(LAYOUTS / name)
    kind = name.partition("-")[0]
    assert interchange.recognise(store) == kind
    layout = interchange.get(kind)
    versions = layout.versions(store)
    identities, kinds = CHAINS[kind]
    assert [version.identity for version in versions] == identities
    assert "".join(version.kind[0] for version in versions) == kinds
    for before, version in itertools.pairwise(versions):
        assert version.base == before.identity
    assert versions[-1].encoding in (name.partition("-")[2], "xor") or kind in ("trl", "grail")
    assert layout.versions(store, versions) == versions
    for version in versions:
        assert version.missing
        assert version.layout == kind
        assert {info.key for info in version.objects} <= {info.key for info in store.list()}


def test_golden_versions_are_read_bit_for_bit(name):
    store = FilesystemStore(LAYOUTS / name)
    layout = interchange.get(name.partition("-")[0])
    weights = load(expected(name, "base"))
    for version in layout.versions(store):
        weights = apply(layout, store, version, weights)
        assert_same(weights, load(expected(name, version.identity)))


def test_a_receiver_follows_golden_directories(name, tmp_path):
    identities, kinds = CHAINS[name.partition("-")[0]]
    target = tmp_path / "model"
    if kinds[0] == "d":
        target.mkdir()
        (target / "model.safetensors").write_bytes(expected(name, "base").read_bytes())
        engine = CheckpointDir(target, adopt=True)
    else:
        engine = CheckpointDir(target)
    receiver = Receiver(FilesystemStore(LAYOUTS / name), engine, verify="full")
    for identity in (identities[1], identities[-1]):
        report = receiver.sync(identity)
        assert (report.layout, report.identity) == (name.partition("-")[0], identity)
        assert report.missing
        assert_same(load(target), load(expected(name, identity)))
