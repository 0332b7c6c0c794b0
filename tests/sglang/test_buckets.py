"""Flat buckets: what belongs together stays together, every byte once, aligned; and SGLang's own reader takes them."""

from __future__ import annotations

import base64
import pickletools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.sglang.buckets import Bucket, Shared, Tensors, _payload, cut, filled
from syncline.sync.checks import fingerprint_all
from syncline.types import TensorMeta

LAYERS = [f"model.layers.{i}.self_attn." for i in range(4)]
METAS = {
    meta.name: meta
    for at, layer in enumerate(LAYERS)
    for meta in (
        TensorMeta(layer + "q_a_proj.weight", "BF16", (3, 5)),
        TensorMeta(layer + "kv_a_proj_with_mqa.weight", "BF16", (1, 5)),
        TensorMeta(layer + "o_proj.weight", "BF16", (5, 4 + at)),
        TensorMeta(layer + "bias", "F32", (5,)),
        TensorMeta(layer + "flags", "U8", (7,)),
    )
}


@given(st.lists(st.sampled_from(sorted(METAS)), unique=True), st.integers(1, 400))
def test_every_tensor_comes_once_with_its_partner_and_aligned(
    names: list[str], most_bytes: int
) -> None:
    buckets = cut(names, METAS, most_bytes)
    listed = [meta.name for bucket in buckets for meta in bucket.metas]
    assert len(set(listed)) == len(listed)
    assert set(names) <= set(listed)
    for bucket in buckets:
        own = {meta.name for meta in bucket.metas}
        for name in own:
            if "q_a_proj" in name:
                assert name.replace("q_a_proj", "kv_a_proj_with_mqa") in own
            if "kv_a_proj_with_mqa" in name:
                assert name.replace("kv_a_proj_with_mqa", "q_a_proj") in own
        at = 0
        for meta in bucket.metas:
            assert at % meta.unit_bytes == 0
            at += meta.nbytes
        assert at == bucket.nbytes
        assert bucket.nbytes <= most_bytes or len(bucket.metas) <= 2


def test_a_tensor_without_elements_is_refused() -> None:
    empty = TensorMeta("none", "BF16", (0, 4))
    with pytest.raises(LayoutError, match="is empty"):
        cut(["none"], {"none": empty})


def bits_of(name: str) -> np.ndarray:
    meta = METAS[name]
    seed = sorted(METAS).index(name)
    raw = np.random.default_rng(seed).integers(0, 256, meta.nbytes, dtype=np.uint8)
    return raw.view({1: "<u1", 2: "<u2", 4: "<u4"}[meta.unit_bytes])


TENSORS = Tensors(bits_of, {name: fingerprint_all(METAS[name], bits_of(name)) for name in METAS})


def bucket_of_all() -> Bucket:
    (bucket,) = cut(sorted(METAS), METAS)
    return bucket


def test_the_payload_names_no_class_of_ours() -> None:
    bucket = bucket_of_all()
    shared = Shared(filled(bucket, TENSORS))
    payload = base64.b64decode(_payload(bucket, shared.flat))
    shared.close()
    named = [
        value
        for op, value, _ in pickletools.genops(payload)
        if op.name in ("GLOBAL", "SHORT_BINUNICODE")
    ]
    assert not any("syncline" in str(value) for value in named)


def test_sglang_reads_the_same_tensors() -> None:
    common = pytest.importorskip(
        "sglang.srt.utils.common", reason="needs the environment of make sglang-env"
    )
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    bucket = bucket_of_all()
    shared = Shared(filled(bucket, TENSORS))
    payload = base64.b64decode(_payload(bucket, shared.flat))
    read = common.MultiprocessingSerializer.deserialize(payload)
    shared.close()
    metadata = [FlattenedTensorMetadata(**vars(meta)) for meta in read["metadata"]]
    tensors = FlattenedTensorBucket(
        flattened_tensor=read["flattened_tensor"], metadata=metadata
    ).reconstruct_tensors()
    assert [name for name, _ in tensors] == [meta.name for meta in bucket.metas]
    for name, tensor in tensors:
        assert tuple(tensor.shape) == METAS[name].shape
        found = tensor.contiguous().view(-1).view(read["flattened_tensor"].dtype).numpy()
        assert found.tobytes() == bits_of(name).tobytes()
