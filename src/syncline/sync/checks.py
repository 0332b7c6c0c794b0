"""What an engine holds, against what a version says: names, dtypes, shapes, and every bit."""

from __future__ import annotations

from collections.abc import Container, Mapping

from syncline import kernels
from syncline.abc import Engine
from syncline.errors import ConfigError, FormatError, LayoutError, VerifyError
from syncline.sync.fingerprints import fingerprints
from syncline.sync.history import History
from syncline.types import ZERO, Bits, Fingerprint, TensorMeta
from syncline.version import HeldVersion, Manifest

_LISTED = 8


def check_kind(name: str, value: object, wanted: type) -> None:
    """Check that an argument implements a seam.

    Raises:
        ConfigError: it does not; says how to make one.
    """
    if not isinstance(value, wanted):
        hint = {
            "store": "open_store(path)",
            "engine": "TorchModule(module) or CheckpointDir(path)",
            "live": "syncline.channels.SharedMemoryOutlet(path) or CollectiveOutlet(address)",
        }
        raise ConfigError(
            f"{name}: expected a syncline {wanted.__name__}, found {type(value).__name__}; "
            f"make one with {hint[name]}"
        )


def fingerprint_all(meta: TensorMeta, bits: Bits) -> Fingerprint:
    """Return the fingerprint of a whole tensor; reads it once."""
    return kernels.fingerprint(bits, 0, kernels.seeds(meta.name))


def adopt(engine: Engine, history: History) -> HeldVersion | None:
    """Find the version whose weights an engine holds without knowing it, and tell the engine.

    Cost: reads every weight once. Returns None if the engine is empty or matches no version.
    """
    metas = engine.tensors()
    if not metas:
        return None
    found = fingerprints(metas.values(), engine.resident)
    held = history.with_fingerprint(sum((fingerprint for _, fingerprint in found), ZERO))
    if held is not None:
        check_layout(metas, held.manifest)
        engine.apply((), held)
    return held


def check_layout(found: Mapping[str, TensorMeta], manifest: Manifest) -> None:
    """Check that an engine holds exactly the tensors of a manifest.

    Raises:
        LayoutError: lists names that are missing, extra, or of another dtype or shape.
    """
    faults = _differences(found, manifest)
    if faults:
        buffers = (
            "; unknown ones that are buffers are published with state_dict(), not named_parameters()"
            if any(name not in manifest.by_name for name in found)
            else ""
        )
        raise LayoutError(
            f"the engine's tensors are not those of version {manifest.version}: {listed(faults)}; give the "
            "engine the run's model in its dtypes, under its names (TorchModule(module, names=...)), or follow "
            f"another store{buffers}",
            version=manifest.version,
        )


def _differences(found: Mapping[str, TensorMeta], manifest: Manifest) -> list[str]:
    wanted = {entry.meta.name: entry.meta for entry in manifest.tensors}
    # Tied names are found without being listed, so names are looked up and not subtracted.
    faults = [f"missing {name}" for name in sorted(wanted) if name not in found]
    faults += [f"unknown {name}" for name in sorted(found) if name not in wanted]
    return faults + [
        f"{name} is {found[name].dtype} {list(found[name].shape)} instead of "
        f"{wanted[name].dtype} {list(wanted[name].shape)}"
        for name in sorted(wanted)
        if name in found and found[name] != wanted[name]
    ]


def check_link(manifest: Manifest, base: Manifest) -> None:
    """Check what a version says of its base against the base itself.

    Raises:
        FormatError: the base's weights had another fingerprint; or a delta changes a tensor's dtype or
            shape, or the fingerprint of a tensor for which it has no payload.
    """
    if manifest.fingerprint_before != base.fingerprint:
        raise FormatError(
            f"version {manifest.version} was made on weights with another fingerprint than those of "
            f"version {base.version}",
            version=manifest.version,
        )
    if manifest.kind == "full":
        return
    faults = _differences({entry.meta.name: entry.meta for entry in base.tensors}, manifest)
    if faults:
        raise FormatError(
            f"version {manifest.version} has other tensors than version {base.version}, on which it was "
            f"made: {listed(faults)}",
            version=manifest.version,
        )
    for entry in manifest.tensors:
        if (
            entry.encoding is None
            and entry.fingerprint != base.by_name[entry.meta.name].fingerprint
        ):
            raise FormatError(
                f"tensor {entry.meta.name!r}: version {manifest.version} has no payload for it, but "
                f"another fingerprint than version {base.version}",
                tensor=entry.meta.name,
                version=manifest.version,
            )


def check_tensor(meta: TensorMeta, base: Manifest, seen: Container[str]) -> None:
    """Check that a tensor to be published is one of the base's, and comes for the first time."""
    if meta.name in seen:
        raise LayoutError(
            f"tensor {meta.name!r} came twice; every name is published once", tensor=meta.name
        )
    entry = base.by_name.get(meta.name)
    if entry is None:
        raise LayoutError(
            f"tensor {meta.name!r} is not in the base, version {base.version}: a run's tensors are fixed by "
            "its first version; publish those, or begin a new run in an empty store",
            tensor=meta.name,
        )
    if entry.meta != meta:
        remedy = (
            "publish the working copy in the dtype that the engines load"
            if entry.meta.shape == meta.shape
            else "another model needs a store of its own"
        )
        raise LayoutError(
            f"tensor {meta.name!r}: expected {entry.meta.dtype} {list(entry.meta.shape)} as in "
            f"version {base.version}, found {meta.dtype} {list(meta.shape)}; {remedy}",
            tensor=meta.name,
        )


def check_complete(base: Manifest, seen: Container[str]) -> None:
    """Check that every tensor of the base was published."""
    missing = sorted(name for name in base.by_name if name not in seen)
    if missing:
        raise LayoutError(
            f"{len(missing)} tensors of version {base.version} were not published: "
            f"{listed(missing)}; publish all of them, changed or not; another model needs a store of its own",
            tensor=missing[0],
        )


def verify_engine(engine: Engine, manifest: Manifest) -> None:
    """Read every weight of the engine and compare its fingerprint with the manifest's.

    Raises:
        VerifyError: names every tensor that differs.
    """
    metas = (entry.meta for entry in manifest.tensors)
    wrong = [
        meta.name
        for meta, fingerprint in fingerprints(metas, engine.resident)
        if fingerprint != manifest.by_name[meta.name].fingerprint
    ]
    if wrong:
        raise VerifyError(
            f"{len(wrong)} of {len(manifest.tensors)} tensors do not hold the bits of version "
            f"{manifest.version}: {listed(wrong)}; repair them with sync(repair=True), on disk "
            "syncline pull --repair",
            tensor=wrong[0],
            version=manifest.version,
        )


def listed(items: list[str]) -> str:
    """Return the first few of a list of faults as one phrase, and how many more there are."""
    more = f"; and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return "; ".join(items[:_LISTED]) + more
