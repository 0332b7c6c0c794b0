"""What Prometheus may scrape of a server's replicas, in its text format; no client library is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from syncline.serving.replica import Replica

METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "syncline_ready": ("gauge", "1 if the replica serves what it should, else 0."),
        "syncline_version": ("gauge", "Number of the version that is served; absent if none is."),
        "syncline_loads_total": ("counter", "Versions that were loaded."),
        "syncline_failures_total": ("counter", "Loads that failed; the old version was served on."),
        "syncline_stage_seconds": ("gauge", "Staging of the last load, beside generation."),
        "syncline_pause_seconds": ("gauge", "Pause of generation in the last load."),
        "syncline_apply_seconds": ("gauge", "Of that pause, what the workers took to apply."),
        "syncline_gate_is_flagged": ("gauge", "1 if the gate flagged the last version, else 0."),
        "syncline_gate_max_difference_nats": ("gauge", "Largest difference of a log-probability."),
        "syncline_gate_mean_difference_nats": ("gauge", "Mean difference of log-probabilities."),
        "syncline_gate_kl_nats": ("gauge", "Lower bound of KL(trainer || engine), mean by token."),
        "syncline_gate_seconds": ("gauge", "What the last check by the gate took."),
        "syncline_changed_tensors": ("gauge", "Tensors that the last load changed."),
        "syncline_dense_tensors": ("gauge", "Of these, those that were loaded whole."),
    }
)
"""Kind and meaning of every metric, by name; each has the label `replica`."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(replicas: Sequence[Replica]) -> str:
    """Return the figures of all replicas.

    Example:
        >>> text([]).splitlines()[:2]
        ['# HELP syncline_ready 1 if the replica serves what it should, else 0.', '# TYPE syncline_ready gauge']
    """
    figures = {replica.name: replica.figures() for replica in replicas}
    lines = []
    for metric, (kind, meaning) in METRICS.items():
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"]
        lines += [
            f'{metric}{{replica="{_escaped(name)}"}} {found[metric]:g}'
            for name, found in figures.items()
            if metric in found
        ]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
