"""Keep inference engines bit-identical to a trainer while sending about one percent of the bytes.

publisher = syncline.Publisher(syncline.open_store("/shared/run"), base="checkpoint")
publisher.publish(model.named_parameters())          # in the trainer, every step

receiver = syncline.Receiver(syncline.open_store("/shared/run"), syncline.TorchModule(model))
receiver.sync()                                      # in the engine
"""

from syncline.channels import MemoryChannel
from syncline.choice import Decision, Topology
from syncline.engines import CheckpointDir, MemoryEngine, TorchModule
from syncline.errors import SynclineError, TornUpdateError
from syncline.sources import CheckpointSource, MemorySource, watch
from syncline.stores import FilesystemStore, MemoryStore, open_store
from syncline.sync import (
    AppliedVersion,
    Publisher,
    PublishReport,
    Ranks,
    Receiver,
    ShardedPublisher,
    choose,
    convert,
)
from syncline.trace import Trace
from syncline.types import TensorMeta

__version__ = "0.1.0"

__all__ = [
    "AppliedVersion",
    "CheckpointDir",
    "CheckpointSource",
    "Decision",
    "FilesystemStore",
    "MemoryChannel",
    "MemoryEngine",
    "MemorySource",
    "MemoryStore",
    "PublishReport",
    "Publisher",
    "Ranks",
    "Receiver",
    "ShardedPublisher",
    "SynclineError",
    "TensorMeta",
    "Topology",
    "TorchModule",
    "TornUpdateError",
    "Trace",
    "choose",
    "convert",
    "open_store",
    "watch",
]
