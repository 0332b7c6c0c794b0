"""Choose how versions travel, from what was measured: the last versions of a run, its store, a pair of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from syncline.abc import Store
from syncline.choice import (
    REFERENCE,
    Decision,
    Density,
    Links,
    Machine,
    Topology,
    Updater,
    decide,
    probe_store,
)
from syncline.choice.values import ASSUMED
from syncline.errors import ConfigError
from syncline.sync.compare import Comparison
from syncline.sync.history import History, read_head
from syncline.version import Kind, Manifest

LAST_VERSIONS = 5
FIRST_SHARE = 0.01
"""What is expected to change before a version has shown it."""

_FIRST_BYTES = 1_000_000_000


def choose(
    topology: Topology,
    store: Store | None = None,
    *,
    density: Density | None = None,
    links: Links | None = None,
    machine: Machine = REFERENCE,
    transport: Updater | None = None,
    kind: Kind | None = None,
    probe_timeout_s: float = 5.0,
) -> Decision:
    """Choose how versions go from a trainer to its engines, and say why.

    What is not given is measured where there is a store: how much changes, from the last versions in it, and
    how fast it is, with a probe of at most 10 MB each way. Else it is assumed, and the decision says so.

    Args:
        topology: where everybody is.
        store: the run's store; it may be empty.
        density, links: what is given is believed; a link to the store that is only assumed is measured.
        machine: `syncline.choice.measure_machine()` measures this one; default: recorded figures.
        transport: choose nothing else; kind: nothing but versions of this kind.
        probe_timeout_s: for the probe.

    Raises:
        ConfigError: nothing is left that reaches the engines; says why, row by row of the table.
        TransportTimeoutError, StoreError: the store is too slow to be measured, or fails.

    Example:
        >>> import syncline
        >>> decision = syncline.choose(syncline.Topology(engines=2, hosts=2), syncline.MemoryStore())
        >>> decision.transport, decision.chosen.kind
        ('store', 'delta')
    """
    if density is None:
        density = assumed_density() if store is None else store_density(store)
    links = Links() if links is None else links
    if store is not None and topology.store and links.store.origin == ASSUMED:
        links = replace(links, store=probe_store(store, timeout_s=probe_timeout_s))
    return decide(topology, density, links, machine, transport=transport, kind=kind)


def assumed_density(model_bytes: int = _FIRST_BYTES) -> Density:
    """Return what is expected of a model of which nothing is known."""
    return Density(model_bytes, FIRST_SHARE, origin="assumed")


def store_density(store: Store, last: int = LAST_VERSIONS) -> Density:
    """Return how much changed in the last deltas of a run; what is expected, before there is one.

    Raises:
        FormatError, VerifyError: the run is damaged.
    """
    if read_head(store) is None:
        return assumed_density()
    versions = list(islice(History.open(store).back(), last + 1))
    if not versions:
        return assumed_density()
    newest = versions[0].manifest
    deltas = [at.manifest for at in versions if at.manifest.kind == "delta"][:last]
    if not deltas or not newest.model_bytes:
        return Density(max(1, newest.model_bytes), FIRST_SHARE, _dtype(newest), "assumed")
    changed = sum(e.changed for at in deltas for e in at.tensors if e.changed is not None)
    units = sum(entry.meta.unit_count for at in deltas for entry in at.tensors)
    origin = f"measured, the last {len(deltas)} deltas of the run"
    return Density(newest.model_bytes, changed / max(1, units), _dtype(newest), origin)


def pair_density(comparison: Comparison) -> Density:
    """Return how much differs between two checkpoints, as `compare` found it.

    Raises:
        ConfigError: they have no weights.
    """
    if not comparison.full_bytes:
        raise ConfigError("the checkpoints have no weights to compare")
    sizes: dict[str, int] = {}
    for item in comparison.tensors:
        sizes[item.meta.dtype] = sizes.get(item.meta.dtype, 0) + item.meta.nbytes
    dtype = max(sizes, key=lambda name: sizes[name])
    return Density(comparison.full_bytes, comparison.density, dtype, "measured, two checkpoints")


def _dtype(manifest: Manifest) -> str:
    """Return the dtype of most weights."""
    sizes: dict[str, int] = {}
    for entry in manifest.tensors:
        sizes[entry.meta.dtype] = sizes.get(entry.meta.dtype, 0) + entry.meta.nbytes
    return max(sizes, key=lambda name: sizes[name], default="BF16")
