"""The live parameters and persistent buffers of a torch module, overwritten where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from syncline import arrays, device
from syncline.abc import Engine
from syncline.arrays import torch_meta
from syncline.commit.overwrite import apply_in_memory
from syncline.engines.tied import Tied, agreeing
from syncline.engines.torch_memory import TorchTarget, check_writable, identity, same_memory
from syncline.errors import ConfigError, LayoutError, TornUpdateError
from syncline.types import Bits, DeviceBits, Record, Span, TensorMeta
from syncline.version import HeldVersion


class TorchModule(Engine):
    """An engine over a torch module that stays in use: no parameter is replaced, no pointer changes.

    Args:
        module: holds weights of the right names, dtypes and shapes, in host or GPU memory.
        names: canonical name for every `state_dict` name that is to be kept in step, in this order;
            entries that it leaves out are left alone. None: all of them, under their own names.

    Raises:
        LayoutError: an entry has no plain memory (DTensor, quantised, meta, overlapping).
        ConfigError: `module` is none; or an entry of the state dict is no parameter or buffer: list the
            others in `names`.

    Tied parameters (one memory, several names) are one tensor with the first name; the other names are
    understood wherever a version uses them, see `Tied`. Parameters that were replaced since the version
    was applied (by `to`, or an assigning `load_state_dict`) make `held` answer None, so that a receiver
    looks at the bits again.

    In GPU memory the kernels of `syncline.kernels.gpu` write, and fingerprint, tensors where they are; they
    have been run by Triton's interpreter, and not yet on a GPU. A delta's decoding reads the base on the
    host, so every tensor that it changes is copied there.
    """

    def __init__(self, module: Any, names: Mapping[str, str] | None = None) -> None:
        if not callable(getattr(module, "state_dict", None)):
            raise ConfigError(
                f"module: expected a torch.nn.Module, found {type(module).__name__}; pass the model itself"
            )
        self._module = module
        entries = module.state_dict(keep_vars=True)
        self._names = {entry: entry for entry in entries} if names is None else dict(names)
        if len(set(self._names.values())) != len(self._names):
            raise ConfigError("names: two entries of the state dict have the same canonical name")
        self._held: HeldVersion | None = None
        self._held_memory: tuple[object, ...] = ()
        self._walked = self._live()

    def tensors(self) -> Tied:
        """Return the tensors by canonical name, each memory listed once; see `Tied`."""
        # Walking a module is slow, so views are taken of what this walk found.
        live = self._walked = self._live()
        metas = {name: torch_meta(name, tensor) for name, tensor in live.items()}
        return Tied(MappingProxyType(metas), MappingProxyType(_aliases(live)))

    def held(self) -> HeldVersion | None:
        """Return the committed version; None if a parameter was replaced since. See `Engine.held`."""
        self._walked = self._live()
        if self._held is None or identity(self._walked) != self._held_memory:
            return None
        return self._held

    def view(self, name: str) -> Bits:
        """Return the bits of a tensor; see `Engine.view`.

        Aliasing: a view of the parameter if it is contiguous and in host memory, else a copy (pinned, if
        it comes from a GPU); of the parameter that the last call of `tensors` or `held` found.
        """
        tensor = self._walked[name]
        if arrays.is_on_gpu(tensor):
            bits = device.to_host(arrays.device_bits(name, tensor)[1])
        else:
            bits = arrays.as_bits(name, tensor)[1].view()
        bits.flags.writeable = False
        return bits

    def resident(self, name: str) -> Bits | DeviceBits:
        """Return the bits of a tensor where they lie, when work asked of this thread's stream is done."""
        tensor = self._walked[name]
        if not arrays.is_on_gpu(tensor):
            return self.view(name)
        bits = arrays.device_bits(name, tensor)[1]
        device.finish(bits)
        return bits

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list; see `Engine.apply`.

        Raises:
            LayoutError: the version has other bits for a name than for one that is tied to it here.
        """
        live = self._live()
        if identity(live) != identity(self._walked):
            raise LayoutError(
                "a parameter of the module was replaced during the update; nothing was written; call again"
            )
        metas = {name: torch_meta(name, tensor) for name, tensor in live.items()}
        before, now = (self._held, self._held_memory), (held, identity(live))
        try:
            apply_in_memory(
                agreeing(records, _aliases(live), held),
                metas,
                TorchTarget(live),
                lambda: self._hold(*now),
                lambda: self._hold(*before),
            )
        except TornUpdateError:
            self._held = None
            raise

    def _hold(self, held: HeldVersion | None, memory: tuple[object, ...]) -> None:
        self._held, self._held_memory = held, memory

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> NoReturn:
        """Refuse: a module has the tensors that its class made.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(
            f"version {held.version} cannot be created in a {type(self._module).__name__}, which has no "
            "tensors to take it; build the module with the model's configuration first",
            version=held.version,
        )

    def _live(self) -> dict[str, Any]:
        """Return the tensors that the module has now, by canonical name."""
        own = dict(self._module.named_parameters(remove_duplicate=False))
        own.update(self._module.named_buffers(remove_duplicate=False))
        live = {}
        for entry, name in self._names.items():
            if entry not in own:
                raise ConfigError(
                    f"the module has no parameter or buffer {entry!r}; pass `names` with the entries of "
                    "its state dict that are to be kept in step",
                    tensor=name,
                )
            check_writable(name, own[entry])
            live[name] = own[entry]
        return live


def _aliases(live: Mapping[str, Any]) -> dict[str, str]:
    """Return the later names of tied tensors with the first name of each."""
    first: dict[object, str] = {}
    aliases = {}
    for name, tensor in live.items():
        memory = same_memory(tensor)
        if memory is None:
            continue
        if memory in first:
            aliases[name] = first[memory]
        else:
            first[memory] = name
    return aliases
