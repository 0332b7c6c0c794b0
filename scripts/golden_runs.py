"""Golden runs: whole directories, each version of them written with the format's own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import xxhash
from golden_payloads import at, flips, noise_bits, ulps, weights, windows_of

from syncline import codecs, kernels
from syncline.format import digest, head, index, manifest, names, part
from syncline.types import ZERO, Bits, TensorMeta
from syncline.version import Head, Kind, Manifest, PartEntry, TensorEntry

RUN_ID = "5ca1ab1e0ddba11ca5cade5c0ffee000"
WINDOW_UNITS = 64

Tensors = Mapping[str, tuple[TensorMeta, Bits]]


class RunWriter:
    """Writes one version after another; a publisher without a store, for small tensors.

    Args:
        directory: where the run lies; the tensors of every version go to `DIRECTORY.expected`.
        run_id: of the run.
    """

    def __init__(self, directory: Path, run_id: str = RUN_ID) -> None:
        self._directory = directory
        self._expected = directory.with_name(f"{directory.name}.expected")
        self._run_id = run_id
        self._held: Tensors = {}
        self._base: Manifest | None = None
        self._base_sha256: str | None = None
        directory.mkdir()
        self._write_head(1)

    def publish(
        self,
        tensors: Tensors,
        kind: Kind,
        asked: str,
        choose: Callable[[str], str],
        files: Mapping[str, bytes] = MappingProxyType({}),
        *,
        epoch: int = 1,
        part_count: int = 2,
    ) -> None:
        """Write the next version: `choose` says the encoding of every tensor that has a payload."""
        base = self._base
        version = 1 if base is None else base.version + 1
        directory = self._directory / names.version_dir(version)
        directory.mkdir()
        entries = []
        payloads: list[dict[str, tuple[TensorMeta, bytes]]] = [{} for _ in range(part_count)]
        for place, (name, (meta, new)) in enumerate(sorted(tensors.items())):
            entry = self._entry(meta, new, kind, choose(name), place % part_count)
            if entry.encoding is not None and entry.part is not None:
                data = self._payload(entry, new)
                kept = meta if entry.encoding == "full" else part.payload_meta(name, len(data))
                payloads[entry.part][name] = kept, data
            entries.append(entry)
        self._base = Manifest(
            run_id=self._run_id,
            epoch=epoch,
            version=version,
            kind=kind,
            base_version=None if base is None else base.version,
            base_sha256=self._base_sha256,
            encoding=asked,
            parts=tuple(
                _write(
                    directory / names.part_name(index, part_count),
                    _part(held, part.metadata_for(kind, asked, _digests(tensors, held))),
                )
                for index, held in enumerate(payloads)
            ),
            files=tuple(_write(directory / name, data) for name, data in sorted(files.items())),
            tensors=tuple(entries),
            fingerprint_before=None if base is None else base.fingerprint,
            fingerprint=sum((entry.fingerprint for entry in entries), ZERO),
        )
        self._held = dict(tensors)
        self._write_manifest(directory, self._base)
        self._write_head(epoch)
        self._write_expected(version)

    def _entry(
        self, meta: TensorMeta, new: Bits, kind: Kind, encoding: str, where: int
    ) -> TensorEntry:
        fingerprint = kernels.fingerprint(new, 0, kernels.seeds(meta.name))
        if kind == "full":
            return TensorEntry(meta, fingerprint, encoding, where, None)
        changed = int(np.count_nonzero(self._old(meta.name, new) != new))
        if not changed:
            return TensorEntry(meta, fingerprint, None, None, None)
        return TensorEntry(meta, fingerprint, encoding, where, changed)

    def _payload(self, entry: TensorEntry, new: Bits) -> bytes:
        meta = entry.meta
        windows = windows_of(meta, self._old(meta.name, new), new, WINDOW_UNITS)
        return b"".join(codecs.get(str(entry.encoding)).encode(meta, windows))

    def _old(self, name: str, new: Bits) -> Bits:
        return self._held[name][1] if self._held else np.zeros_like(new)

    def _write_manifest(self, directory: Path, value: Manifest) -> None:
        (directory / names.INDEX).write_bytes(index.dump(value))
        data, sidecar = manifest.dump(value)
        if sidecar is not None:
            (directory / names.SIDECAR).write_bytes(sidecar)
        (directory / names.MANIFEST).write_bytes(data)
        self._base_sha256 = digest.sha256(data)

    def _write_head(self, epoch: int) -> None:
        version = None if self._base is None else self._base.version
        data = head.dump(Head(self._run_id, epoch, version, self._base_sha256))
        (self._directory / names.HEAD).write_bytes(data)

    def _write_expected(self, version: int) -> None:
        self._expected.mkdir(exist_ok=True)
        metas = [meta for meta, _ in self._held.values()]
        data = b"".join(part.encode(metas, lambda name: [self._held[name][1].tobytes()]))
        (self._expected / f"{version:06d}.safetensors").write_bytes(data)


def write_runs(directory: Path) -> None:
    """Write the golden runs: every kind and encoding, a small one, a long table, no version."""
    _write_history(RunWriter(directory / "history"))
    _write_small(RunWriter(directory / "small"))
    _write_many(RunWriter(directory / "many"))
    RunWriter(directory / "unborn")


def model_of(*metas: TensorMeta) -> dict[str, tuple[TensorMeta, Bits]]:
    """Return a model of these tensors."""
    return {
        meta.name: (
            meta,
            weights(meta.name, meta.count) if meta.dtype == "BF16" else noise_bits(meta.name, meta),
        )
        for meta in metas
    }


HISTORY = (
    TensorMeta("lm_head.weight", "BF16", (12, 12)),
    TensorMeta("model.layers.0.mlp.weight", "BF16", (10, 16)),
    TensorMeta("model.layers.0.mlp.weight_scale_inv", "F32", (2, 3)),
    TensorMeta("model.layers.0.attn.weight", "F8_E4M3", (10, 10)),
    TensorMeta("model.layers.0.rotary.positions", "I64", (7,)),
    TensorMeta("model.norm.weight", "BF16", (12,)),
    TensorMeta("model.mask", "BOOL", (5,)),
    TensorMeta("model.nothing", "F16", (0, 4)),
    TensorMeta("scale é", "F32", ()),
)


def stepped(tensors: Tensors, label: str, of_256: int) -> dict[str, tuple[TensorMeta, Bits]]:
    """Return the model after an optimizer step: its BF16 and F32 tensors move by single ulps."""
    return {
        name: (
            meta,
            ulps(f"{label} {name}", of_256)(bits) if meta.dtype in ("BF16", "F32") else bits,
        )
        for name, (meta, bits) in tensors.items()
    }


def _write_history(run: RunWriter) -> None:
    files = {"config.json": b'{"model_type": "golden"}\n', "tokenizer.model": b"\0\1\2"}
    model = model_of(*HISTORY)
    run.publish(model, "full", "auto", lambda _: "full", files)
    for label, encoding in enumerate(("packed", "xor", "overwrite", "planes", "full")):
        model = stepped(model, str(label), 20)
        run.publish(model, "delta", encoding, lambda _, named=encoding: named)
    name = "model.layers.0.attn.weight"
    model = stepped(model, "mixed", 60) | {name: (model[name][0], flips(name, 200)(model[name][1]))}
    mixed = {name: "planes", "lm_head.weight": "xor", "model.norm.weight": "full"}
    run.publish(model, "delta", "auto", lambda name: mixed.get(name, "packed"), epoch=2)
    run.publish(model, "delta", "auto", lambda _: "packed", epoch=2)
    model = stepped(model, "anchor", 20)
    run.publish(
        model,
        kind="full",
        asked="packed",
        choose=lambda _: "planes",
        files=files,
        epoch=3,
        part_count=1,
    )


def _write_small(run: RunWriter) -> None:
    """Write two versions of three tensors, one of which stays as it is."""
    model = model_of(
        TensorMeta("embed", "BF16", (8, 6)),
        TensorMeta("head", "BF16", (20, 12)),
        TensorMeta("norm", "F16", (6,)),
    )
    files = {"config.json": b"{}"}
    run.publish(model, "full", "auto", lambda _: "full", files, part_count=1)
    model = stepped(model, "small", 200)
    run.publish(model, "delta", "auto", lambda _: "packed", part_count=1)


def _write_many(run: RunWriter) -> None:
    """Write a model of so many tensors that the table moves out of the manifest."""
    metas = [TensorMeta(f"layers.{layer:02d}.bias", "BF16", (3,)) for layer in range(66)]
    model = model_of(*metas)
    run.publish(model, "full", "auto", lambda _: "full", part_count=1)
    for layer in (0, 33, 65):
        name = f"layers.{layer:02d}.bias"
        model[name] = model[name][0], at({layer % 3: 1})(model[name][1])
    run.publish(model, "delta", "auto", lambda _: "packed", part_count=1)


def _part(
    payloads: Mapping[str, tuple[TensorMeta, bytes]], metadata: Mapping[str, str] | None
) -> bytes:
    metas = [meta for meta, _ in payloads.values()]
    return b"".join(part.encode(metas, lambda name: [payloads[name][1]], metadata))


def _digests(tensors: Tensors, held: Mapping[str, object]) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(tensors[name][1].tobytes()) for name in held}


def _write(path: Path, data: bytes) -> PartEntry:
    path.write_bytes(data)
    return PartEntry(path.name, len(data), digest.sha256(data))
