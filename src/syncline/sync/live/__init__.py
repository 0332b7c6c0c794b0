"""Versions straight from the trainer to engines that are there now. See docs/decisions/0014-live-paths.md."""

from syncline.sync.live.deliver import Courier
from syncline.sync.live.goods import Goods, Whole
from syncline.sync.live.take import Taker

__all__ = ["Courier", "Goods", "Taker", "Whole"]
