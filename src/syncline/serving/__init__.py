"""The hot-load control API on an engine's host: a server, its replicas, and a gate for requests.

The client is `HotLoadClient`, which trainers use without any of this.
"""

from syncline.hotload import FIREWORKS, ROLLOUT, Dialect, HotLoadClient, WeightVersion
from syncline.serving.gate import WeightVersionGate
from syncline.serving.puller import Puller
from syncline.serving.replica import Replica
from syncline.serving.scored import ScoredPuller
from syncline.serving.server import hot_load_app, serve

__all__ = [
    "FIREWORKS",
    "ROLLOUT",
    "Dialect",
    "HotLoadClient",
    "Puller",
    "Replica",
    "ScoredPuller",
    "WeightVersion",
    "WeightVersionGate",
    "hot_load_app",
    "serve",
]
