"""The hot-load control API as its client speaks it: tell a deployment of a new version, wait for it.

Objects travel through a store; this API only says which identity to load next, and asks which replica has
it. `syncline.serving` has the other side.
"""

from syncline.hotload.client import HotLoadClient, Loaded
from syncline.hotload.dialect import FIREWORKS, ROLLOUT, Dialect
from syncline.hotload.status import ReplicaStatus
from syncline.hotload.token import Token
from syncline.hotload.weight_version import Refusal, WeightVersion

__all__ = [
    "FIREWORKS",
    "ROLLOUT",
    "Dialect",
    "HotLoadClient",
    "Loaded",
    "Refusal",
    "ReplicaStatus",
    "Token",
    "WeightVersion",
]
