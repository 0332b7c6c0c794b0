"""The log-probability gate: after a commit, does the engine compute what the trainer computes?

Fingerprints prove what lies in an engine's memory. They do not see what the engine makes of it: a prefix cache
of the old weights, weights derived from others, kernels that read another layout. So trainer and
engine score the same fixed texts, and a version is flagged, or rolled back, where they differ by more than
rounding does. How much rounding does is learned from a version whose weights are proven.
"""

from syncline.gate.deviation import Deviation, deviation
from syncline.gate.gate import Gate, GateAction, RollBack
from syncline.gate.limits import Limits, learn, read_limits
from syncline.gate.probes import draw_probes
from syncline.gate.reference import Reference, make_reference, publish_scores, read_reference
from syncline.gate.report import Committed, GateReport

__all__ = [
    "Committed",
    "Deviation",
    "Gate",
    "GateAction",
    "GateReport",
    "Limits",
    "Reference",
    "RollBack",
    "deviation",
    "draw_probes",
    "learn",
    "make_reference",
    "publish_scores",
    "read_limits",
    "read_reference",
]
