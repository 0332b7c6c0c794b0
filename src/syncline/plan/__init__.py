"""Plans: from the layout of a trainer and the layout of an engine, who sends what to whom.

Pure geometry: sees metadata, never an element; the same plan on every rank, with a digest to prove it.
"""

from syncline.plan.describe import heat_map, legend, read_sizes, summary
from syncline.plan.move import Mover, execute, incoming, outgoing, receive, send
from syncline.plan.pieces import Piece, intersect
from syncline.plan.planner import Load, Plan, Transfer, load_of, make_plan
from syncline.plan.record import record, records
from syncline.plan.relay import Assignment, Fetch, Node, assign, receivers

__all__ = [
    "Assignment",
    "Fetch",
    "Load",
    "Mover",
    "Node",
    "Piece",
    "Plan",
    "Transfer",
    "assign",
    "execute",
    "heat_map",
    "incoming",
    "intersect",
    "legend",
    "load_of",
    "make_plan",
    "outgoing",
    "read_sizes",
    "receive",
    "receivers",
    "record",
    "records",
    "send",
    "summary",
]
