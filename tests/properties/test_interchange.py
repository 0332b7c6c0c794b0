"""Any weights go through any layout and back; any bytes are read as what they are, or refused."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_reading import apply, assert_same, load
from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, interchange
from syncline.errors import SynclineError
from syncline.interchange.inflating import Inflating
from syncline.stores import FilesystemStore
from syncline.sync.conversion import convert

GOLDEN = Path(__file__).parents[1] / "golden" / "layouts"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if not path.name.endswith(".expected"))
SHAPES = st.lists(st.integers(0, 12), max_size=3).map(tuple)
KINDS = st.sampled_from(["u1", "i4", "f2", "f4", "f8"])


@st.composite
def runs(draw):
    """Return two to four states of a small model; steps may change nothing, or everything."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    model = draw(st.lists(st.tuples(SHAPES, KINDS), min_size=1, max_size=4))
    state = {}
    for number, (shape, kind) in enumerate(model):
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        state[f"t{number}"] = np.frombuffer(rng.bytes(size), kind).reshape(shape)
    states = [state]
    for share in draw(st.lists(st.sampled_from([0.0, 0.02, 0.5, 1.0]), min_size=1, max_size=3)):
        new = {}
        for name, array in states[-1].items():
            bits = np.frombuffer(array.tobytes(), np.uint8).copy()
            where = rng.random(bits.size) < share
            bits[where] = rng.integers(0, 256, where.sum(), np.uint8)
            new[name] = bits.view(array.dtype).reshape(array.shape)
        states.append(new)
    return states


@settings(max_examples=12)
@given(
    run=runs(),
    through=st.sampled_from([("slime", "xor"), ("slime", "overwrite"), ("fireworks", "arc_v2")]),
)
def test_any_run_goes_through_a_layout_and_back(run, through):
    layout, encoding = through
    ours, theirs, back = MemoryStore(), MemoryStore(), MemoryStore()
    publisher = Publisher(ours, anchor_every=None)
    for state in run:
        publisher.publish(state)
    convert(ours, theirs, layout, encoding=encoding)
    report = convert(theirs, back, "syncline")
    engine = MemoryEngine()
    receiver = Receiver(back, engine, verify="full")
    for item, state in zip(report.versions, run, strict=True):
        receiver.sync(item.target)
        for name, array in state.items():
            assert engine.view(name).tobytes() == array.tobytes()


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    place=st.floats(0, 1, exclude_max=True),
    which=st.integers(0, 1 << 16),
    flip=st.integers(1, 255),
)
def test_a_damaged_directory_is_refused_or_gives_what_it_can_prove(name, place, which, flip):
    """Whatever byte is damaged, nothing but Syncline's own errors comes out, and digests hold."""
    layout = interchange.get(name.partition("-")[0])
    expected = GOLDEN / f"{name}.expected"
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / name
        shutil.copytree(GOLDEN / name, root)
        files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
        path = files[which % len(files)]
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= flip
        path.write_bytes(content)
        store = FilesystemStore(root)
        weights = load(expected / "base.safetensors")
        try:
            for version in layout.versions(store):
                weights = apply(layout, store, version, weights)
                wanted = expected / f"{version.identity}.safetensors"
                if version.checksum is not None and wanted.exists():
                    assert_same(weights, load(wanted))
        except SynclineError:
            return


@given(content=st.binary(max_size=300), stream=st.binary(max_size=60), size=st.integers(0, 400))
def test_zlib_streams_give_exactly_their_content_or_an_error(content, stream, size):
    import zlib

    whole = zlib.compress(content)
    reader = Inflating(whole, len(content))
    half = len(content) // 2
    assert reader.read(half) + reader.read(len(content) - half) == content
    try:
        read = Inflating(stream, size).read(size)
    except SynclineError:
        return
    assert zlib.decompress(stream) == read
