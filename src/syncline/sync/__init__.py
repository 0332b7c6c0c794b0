"""The only package that joins stages: publisher on the trainer's side, receiver on the engine's."""

from syncline.sync.choosing import choose
from syncline.sync.conversion import convert
from syncline.sync.publisher import Publisher
from syncline.sync.receiver import Receiver
from syncline.sync.reports import AppliedVersion, Notice, PublishReport
from syncline.sync.sharded import Ranks, ShardedPublisher

__all__ = [
    "AppliedVersion",
    "Notice",
    "PublishReport",
    "Publisher",
    "Ranks",
    "Receiver",
    "ShardedPublisher",
    "choose",
    "convert",
]
