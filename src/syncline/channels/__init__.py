"""Live paths between two sides: channels for messages, and outlets and inlets for the buckets of a version."""

from syncline.channels.collective import CollectiveInlet, CollectiveOutlet
from syncline.channels.memory import MemoryChannel
from syncline.channels.memory_path import MemoryInlet, MemoryOutlet
from syncline.channels.shared_memory import SharedMemoryInlet, SharedMemoryOutlet
from syncline.channels.sockets import SocketChannel

__all__ = [
    "CollectiveInlet",
    "CollectiveOutlet",
    "MemoryChannel",
    "MemoryInlet",
    "MemoryOutlet",
    "SharedMemoryInlet",
    "SharedMemoryOutlet",
    "SocketChannel",
]
