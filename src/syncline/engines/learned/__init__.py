"""Engines whose layout is learned: their own loader is watched once, and says where every element goes."""

from syncline.engines.learned.engine import LearnedEngine
from syncline.engines.learned.learning import Learned, learn, together

__all__ = ["Learned", "LearnedEngine", "learn", "together"]
