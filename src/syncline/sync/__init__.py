"""The only package that joins stages: publisher on the trainer's side, receiver on the engine's."""

from syncline.sync.publisher import Publisher
from syncline.sync.receiver import Receiver
from syncline.sync.reports import AppliedVersion, PublishReport
from syncline.sync.sharded import Ranks, ShardedPublisher

__all__ = [
    "AppliedVersion",
    "PublishReport",
    "Publisher",
    "Ranks",
    "Receiver",
    "ShardedPublisher",
]
