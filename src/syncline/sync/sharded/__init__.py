"""Publish from every rank of a trainer; nothing is gathered. See docs/how-to/publish-from-every-rank.md."""

from syncline.sync.sharded.publisher import ShardedPublisher
from syncline.sync.sharded.ranks import Ranks

__all__ = ["Ranks", "ShardedPublisher"]
