"""A stand-in for Transformer Engine on a CPU: the names of its modules and what they hold, no arithmetic.

megatron-core builds its usual layers out of Transformer Engine's modules, which cannot be imported without
CUDA. What a rank holds follows from how these modules cut their sizes, and that much is here: parameters with
their names, shapes and the attributes that Transformer Engine gives them. No layer can be run.

`install()` must come before the first import of megatron.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# Old enough for megatron-core 0.16 not to ask for what is not here, new enough for the sinks of gpt-oss.
VERSION = "2.8.0"


class Base(torch.nn.Module):
    """What every module of Transformer Engine answers to Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def get_extra_state(self) -> torch.Tensor:
        """Nothing is scaled, so there is nothing to keep."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass

    def backward_dw(self) -> None:
        pass


def _cut(sizes: tuple[int, int], mode: str | None, ways: int) -> tuple[int, int]:
    """Return rows and columns of a rank's part; a matrix without a parallel mode is held whole."""
    columns, rows = sizes
    return rows // (ways if mode == "column" else 1), columns // (ways if mode == "row" else 1)


def _weight(
    shape: tuple[int, ...], mode: str | None, dtype: Any, device: Any
) -> torch.nn.Parameter:
    """Return a weight that says of itself what Transformer Engine says: parallel, even if it is not cut."""
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    weight.tensor_model_parallel = True
    weight.partition_dim = 1 if mode == "row" else 0
    weight.partition_stride = 1
    return weight


def _bias(rows: int, mode: str | None, dtype: Any, device: Any) -> torch.nn.Parameter:
    bias = torch.nn.Parameter(torch.zeros(rows, dtype=dtype, device=device))
    if mode == "column":
        bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1
    return bias


class Linear(Base):
    """One matrix."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        **_: Any,
    ) -> None:
        super().__init__()
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.use_bias, self.return_bias = bias, return_bias
        rows, columns = _cut((in_features, out_features), parallel_mode, self.tp_size)
        self.in_features, self.out_features = columns, rows
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self._hold_norm(in_features, params_dtype, device)
        self.weight = _weight((rows, columns), parallel_mode, params_dtype, device)
        if bias:
            self.bias = _bias(rows, parallel_mode, params_dtype, device)
        else:
            self.bias = torch.empty(0)

    def _hold_norm(self, size: int, dtype: Any, device: Any) -> None:
        """A plain matrix has none."""


class LayerNormLinear(Linear):
    """A norm and the matrix after it."""

    def __init__(
        self, in_features: int, out_features: int, *, normalization: str = "LayerNorm", **more: Any
    ) -> None:
        self.normalization = normalization  # asked for before the weight is made
        super().__init__(in_features, out_features, **more)

    def _hold_norm(self, size: int, dtype: Any, device: Any) -> None:
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device))


class GroupedLinear(Base):
    """The same matrix of several experts, each a parameter of its own."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Any = None,
        parallel_mode: str | None = None,
        device: Any = "cpu",
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        rows, columns = _cut((in_features, out_features), parallel_mode, tp_size)
        self.in_features, self.out_features = columns, rows
        for index in range(num_gemms):
            weight = _weight((rows, columns), parallel_mode, params_dtype, device)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                self.register_parameter(
                    f"bias{index}", _bias(rows, parallel_mode, params_dtype, device)
                )


class RMSNorm(torch.nn.Module):
    """A norm without a bias."""

    def __init__(
        self,
        hidden_size: Any = None,
        *,
        normalized_shape: Any = None,
        sequence_parallel: bool = False,
        params_dtype: Any = None,
        device: Any = "cpu",
        **_: Any,
    ) -> None:
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.weight = torch.nn.Parameter(torch.ones(shape, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel


class LayerNorm(RMSNorm):
    """A norm with a bias."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))


class DotProductAttention(torch.nn.Module):
    """Holds nothing but the sinks of gpt-oss, one for each head of the rank."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        *,
        softmax_type: str = "vanilla",
        tp_size: int = 1,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_type = softmax_type
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))


class RngTracker:
    """Keeps states of generators and forks none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Any] = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, state: Any) -> None:
        self.states_[name] = state

    def fork(self, name: str | None = None) -> Any:
        return nullcontext()


class NoFp8:
    """Answers that nothing is in FP8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def _empty(*names: str, of: type = object) -> dict[str, type]:
    """Return classes that are only named."""
    return {name: type(name, (of,), {}) for name in names}


class Quantized(torch.Tensor):
    """The type of what there is none of."""


_RECIPES = (
    *("Recipe", "CustomRecipe", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"),
    *("MXFP8BlockScaling", "NVFP4BlockScaling", "Format"),
)
_OPS = ("Sequential", "FusibleOperation", "LayerNorm", "RMSNorm", "BasicLinear", "Linear", "Bias")

_MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": _empty(*_RECIPES),
    "pytorch": {
        "Linear": Linear,
        "LayerNormLinear": LayerNormLinear,
        "GroupedLinear": GroupedLinear,
        "LayerNorm": LayerNorm,
        "RMSNorm": RMSNorm,
        "DotProductAttention": DotProductAttention,
        "fp8_autocast": nullcontext,
        "fp8_model_init": nullcontext,
    },
    "pytorch.distributed": {
        "CudaRNGStatesTracker": RngTracker,
        "checkpoint": lambda run, *args, **_: run(*args),
        "is_fp8_activation_recompute_enabled": lambda: False,
        "activation_recompute_forward": nullcontext,
        "get_all_rng_states": dict,
    },
    "pytorch.float8_tensor": {"Float8Tensor": Quantized},
    "pytorch.fp8": {
        "FP8GlobalStateManager": NoFp8,
        "fp8_autocast": nullcontext,
        "fp8_model_init": nullcontext,
    },
    "pytorch.module": {},
    "pytorch.module.base": {"TransformerEngineBaseModule": Base},
    "pytorch.ops": _empty(*_OPS, of=torch.nn.Module),
    "pytorch.router": dict.fromkeys(
        (
            "fused_compute_score_for_moe_aux_loss",
            "fused_moe_aux_loss",
            "fused_topk_with_score_function",
        )
    ),
    "pytorch.tensor": {"QuantizedTensor": Quantized},
    "pytorch.tensor.float8_tensor": {"Float8Tensor": Quantized},
}


def _cannot_run(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in holds parameters and runs nothing")


# What gated delta networks ask for is only what would run them.
_LINEAR_ATTENTION: dict[str, dict[str, Any]] = {
    "fla": {"__version__": "0.0.0"},  # too old for transformers, which then does without
    "fla.modules": {},
    "fla.modules.convolution": {"causal_conv1d": _cannot_run},
    "fla.modules.l2norm": {"l2norm": _cannot_run},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _cannot_run},
}


def install() -> None:
    """Make `import transformer_engine` find this; and `import fla`, which also asks for CUDA."""
    engine = {f"transformer_engine.{path}".rstrip("."): of for path, of in _MODULES.items()}
    for name, content in {**engine, **_LINEAR_ATTENTION}.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
