"""Live paths between two sides. In memory for now; `torch.distributed` and RDMA come behind this seam."""

from syncline.channels.memory import MemoryChannel

__all__ = ["MemoryChannel"]
