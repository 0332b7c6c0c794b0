"""What a training framework holds on this rank, by the local names that layouts use; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from syncline.arrays import torch_meta
from syncline.errors import LayoutError
from syncline.layouts import Layout
from syncline.layouts.sharded import Sharding, dtensor_layout, dtensor_sharding
from syncline.types import TensorMeta

_WRAPPERS = ("DistributedDataParallel", "Float16Module", "FullyShardedDataParallel")


def fsdp_layout(named: Iterable[tuple[str, Any]]) -> Layout:
    """Return the layout of a model whose tensors are DTensors on one mesh over all ranks (FSDP2, TP, HSDP).

    Plain tensors among them are taken to be the same on every rank; publishing checks that they are.

    Args:
        named: `module.named_parameters()`, cast to the dtypes that the engines load where the trainer has
            wider ones: `((name, p.to(torch.bfloat16)) for name, p in module.named_parameters())`.

    Raises:
        LayoutError: no DTensor, several meshes, or a mesh that does not count all ranks in order.

    Collective: no; every rank gets the same.
    """
    metas: list[TensorMeta] = []
    shardings: dict[str, Sharding] = {}
    plain: list[TensorMeta] = []
    mesh: tuple[int, ...] | None = None
    for name, tensor in named:
        if not hasattr(tensor, "to_local"):
            meta = torch_meta(name, tensor)
            plain.append(meta)
        else:
            _check_mesh(name, tensor.device_mesh)
            local = torch_meta(name, tensor.to_local())
            meta = TensorMeta(name, local.dtype, tuple(tensor.shape))
            shardings[name] = dtensor_sharding(tensor)
            mesh = shardings[name].mesh
        metas.append(meta)
    if mesh is None:
        raise LayoutError("expected DTensors, as fully_shard makes them; found none: use Publisher")
    for meta in plain:
        shardings[meta.name] = Sharding(mesh, (None,) * len(mesh))
    return dtensor_layout(metas, shardings)


def _check_mesh(name: str, mesh: Any) -> None:
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise LayoutError(
            f"{name}: its mesh has ranks {ranks}; expected all ranks, counted in order along the mesh",
            tensor=name,
        )


def megatron_shards(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield this rank's tensors of a Megatron model by the names that `megatron_layout` uses.

    Args:
        chunks: the model as Megatron's `get_model` returns it: a list of modules, one for each virtual stage,
            wrapped or not.

    Returns:
        pairs of `CHUNK/name` and the parameter, or the router's `expert_bias`, which is a buffer.
    """
    for number, wrapped in enumerate(chunks):
        module = wrapped
        while type(module).__name__ in _WRAPPERS:
            module = module.module
        for name, parameter in module.named_parameters():
            yield f"{number}/{name}", parameter
        for name, buffer in module.named_buffers():
            if name.endswith("expert_bias"):
                yield f"{number}/{name}", buffer
