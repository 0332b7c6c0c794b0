"""Which way a version takes: from where the engines are, how fast the links are, and how much changes.

`decide` is a pure function from printable values to a printable value; who measures them, and who opens what
was decided, is elsewhere (`syncline.sync.choosing`). Costs are counted in the same terms for every way, so
that others may add them up for whole fleets.
"""

from syncline.choice.decision import Decision, Option, decide
from syncline.choice.machine import REFERENCE, Coding, Machine, measure_machine
from syncline.choice.matrix import MATRIX, Row, against
from syncline.choice.prediction import Terms, predict
from syncline.choice.probe import answer_probe, probe_channel, probe_store
from syncline.choice.values import Density, Link, Links, Topology, Updater

__all__ = [
    "MATRIX",
    "REFERENCE",
    "Coding",
    "Decision",
    "Density",
    "Link",
    "Links",
    "Machine",
    "Option",
    "Row",
    "Terms",
    "Topology",
    "Updater",
    "against",
    "answer_probe",
    "decide",
    "measure_machine",
    "predict",
    "probe_channel",
    "probe_store",
]
