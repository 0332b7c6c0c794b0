"""What a model's `config.json` says about it: dimensions, tags of layers, canonical dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from syncline.errors import LayoutError
from syncline.layouts.rules import Dims, Rule

Config = Mapping[str, Any]
"""The content of a Hugging Face `config.json`."""

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

# Our name of a dimension, and the names that configs have for it; the first that is there counts.
_NAMES = (
    ("hidden", "hidden_size"),
    ("vocab", "vocab_size"),
    ("layers", "num_hidden_layers"),
    ("heads", "num_attention_heads"),
    ("groups", "num_key_value_heads num_attention_heads"),
    ("head", "head_dim"),
    ("inter", "intermediate_size"),
    ("experts", "num_experts n_routed_experts num_local_experts"),
    ("expert", "moe_intermediate_size intermediate_size"),
    ("shared", "shared_expert_intermediate_size"),
    ("q_lora", "q_lora_rank"),
    ("kv_lora", "kv_lora_rank"),
    ("rope", "qk_rope_head_dim"),
    ("nope", "qk_nope_head_dim"),
    ("v_head", "v_head_dim"),
    ("key_heads", "linear_num_key_heads"),
    ("value_heads", "linear_num_value_heads"),
    ("key", "linear_key_head_dim"),
    ("value", "linear_value_head_dim"),
    ("kernel", "linear_conv_kernel_dim"),
    ("mtp", "num_nextn_predict_layers"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as data.

    Attributes:
        layer: rules of one decoder layer, local names after `decoder.layers.I.`, canonical names after
            `model.layers.I.`.
        mtp: rules of one multi-token-prediction layer, local names after `mtp.layers.K.`; the decoder
            layer inside follows `layer`.
        mtp_prefix: canonical prefix of MTP layer K; `{k}` is K and `{l}` is layers + K.
        mtp_inner: canonical prefix of the decoder layer inside, where it is not the same.
        mtp_copies: canonical names after the MTP prefix of stored copies of embedding and output.
        engine_names: parts of canonical names that engines spell otherwise.
        tags: tags of every layer.
        defaults: what the family's configs mean where they leave a key out.
    """

    layer: tuple[Rule, ...]
    mtp: tuple[Rule, ...] = ()
    mtp_prefix: str = "model.layers.{l}."
    mtp_inner: str | None = None
    mtp_copies: tuple[str, str] | None = None
    engine_names: tuple[tuple[str, str], ...] = ()
    tags: frozenset[str] = frozenset()
    defaults: Config = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How a model around a text model names its parts, whatever the text model's family is.

    Attributes:
        root: canonical prefix of the text part, where a family's tables say `model.`.
        local_root: local prefix of the text part.
        towers: canonical and local prefix of parts that the first stage holds whole.
        head_root: canonical prefix of the output, which lies beside the text part.
    """

    root: str
    local_root: str
    towers: tuple[tuple[str, str], ...]
    head_root: str = ""


# PEFT puts its own prefix before the names of adapters, and nowhere else.
_ADAPTER = ".lora_"
TEXT_ONLY = Wrapper("model.", "", ())


@dataclass(frozen=True, slots=True)
class Model:
    """A family with the numbers of one config.

    Attributes:
        family: its tables.
        dims: sizes by the names that tables use.
        layer_tags: tags of each decoder layer; those of MTP layers follow.
        dtype: canonical dtype, where a rule names no other.
        wrapper: how names begin.
    """

    family: Family
    dims: Dims
    layer_tags: tuple[frozenset[str], ...]
    dtype: str
    wrapper: Wrapper = TEXT_ONLY

    @property
    def layers(self) -> int:
        """Number of decoder layers, without MTP."""
        return self.dims["layers"]

    @property
    def mtp(self) -> int:
        """Number of multi-token-prediction layers."""
        return self.dims["mtp"]

    def mtp_prefix(self, k: int) -> str:
        """Return what canonical names of MTP layer k begin with, in the table's words."""
        return self.family.mtp_prefix.format(k=k, l=self.layers + k)

    def mtp_inner(self, k: int) -> str:
        """Return what names of the decoder layer inside MTP layer k begin with, in the table's words."""
        inner = self.family.mtp_inner
        return self.mtp_prefix(k) if inner is None else inner.format(k=k, l=self.layers + k)

    def mtp_prefixes(self, k: int) -> tuple[str, ...]:
        """Return what canonical names of MTP layer k begin with, everything of the first included."""
        names = [rule.pieces[0].partition(":")[0] for rule in self.family.mtp if k == 0]
        prefix = self.mtp_prefix(k)
        return tuple(
            self.canonical(name) for name in (self.mtp_inner(k), *(prefix + n for n in names))
        )

    def canonical(self, name: str) -> str:
        """Return a canonical name that a table gives, under this model's root."""
        if name.startswith("model."):
            name = self.wrapper.root + name.removeprefix("model.")
        elif name.startswith("lm_head."):
            name = self.wrapper.head_root + name
        return f"base_model.model.{name}" if _ADAPTER in name else name


def read_model(
    config: Config,
    families: Mapping[str, Family] | Family,
    wrappers: Mapping[str, Wrapper],
) -> Model:
    """Return the model that a `config.json` describes; a vision model's text part, under its prefix.

    Raises:
        LayoutError: no family for its `model_type`, or a dimension that every model has is missing.
    """
    wrapper, text = TEXT_ONLY, config
    kind = str(config.get("model_type"))
    if isinstance(config.get("text_config"), Mapping):
        if kind not in wrappers:
            raise LayoutError(
                f"no prefix is known for the text part of model_type {kind!r}; there are "
                f"{sorted(wrappers)}"
            )
        wrapper = wrappers[kind]
        text = {**config["text_config"]}
        if "tie_word_embeddings" in config:
            text["tie_word_embeddings"] = config["tie_word_embeddings"]
        kind = str(text.get("model_type"))
    if isinstance(families, Family):
        families = {kind: families}
    if kind not in families:
        raise LayoutError(
            f"no family for model_type {kind!r}; there are {sorted(families)}. Register a table under "
            "the entry point group 'syncline.families'"
        )
    family = families[kind]
    filled = {**family.defaults, **text}
    dims = _dims(filled)
    name = str(filled.get("dtype") or filled.get("torch_dtype") or "bfloat16").removeprefix(
        "torch."
    )
    if name not in _DTYPES:
        raise LayoutError(f"config dtype {name!r} is not one of {sorted(_DTYPES)}")
    tags = tuple(
        _tags(filled, family, dims, layer) for layer in range(dims["layers"] + dims["mtp"])
    )
    return Model(family, dims, tags, _DTYPES[name], wrapper)


def _dims(config: Config) -> dict[str, int]:
    dims: dict[str, int] = {}
    for ours, theirs in _NAMES:
        values = [config[key] for key in theirs.split() if isinstance(config.get(key), int)]
        if values:
            dims[ours] = values[0]
    missing = {"hidden", "vocab", "layers", "heads"} - dims.keys()
    if missing:
        raise LayoutError(f"the config gives no {sorted(missing)}")
    dims.setdefault("head", dims["hidden"] // dims["heads"])
    dims.setdefault("mtp", 0)
    dims["q"] = dims["heads"] * dims["head"]
    dims["kv"] = dims["groups"] * dims["head"]
    if isinstance(config.get("n_shared_experts"), int):
        dims["shared"] = config["n_shared_experts"] * dims["expert"]
    if "key_heads" in dims:
        dims["value_ratio"] = dims["value_heads"] // dims["key_heads"]
    return dims


def _tags(config: Config, family: Family, dims: Dims, layer: int) -> frozenset[str]:
    """Return the tags of a layer: config keys that are true, what kind of layer it is, the family's."""
    tags = {key for key, value in config.items() if value is True}
    if dims.get("experts"):
        is_dense = (
            layer < config.get("first_k_dense_replace", 0)
            or layer in config.get("mlp_only_layers", ())
            or (layer + 1) % config.get("decoder_sparse_step", 1) != 0
            or layer % config.get("moe_layer_freq", 1) != 0
        )
    else:
        is_dense = True
    tags.add("dense" if is_dense else "moe")
    if "key_heads" in dims and layer < dims["layers"]:
        interval = config.get("full_attention_interval", 4)
        default = "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        types = config.get("layer_types")
        tags.add("linear" if (types[layer] if types else default) == "linear_attention" else "full")
    else:
        tags.add("full")
    if dims.get("q_lora"):
        tags.add("q_lora")
    if dims.get("shared"):
        tags.add("shared")
    return frozenset(tags | family.tags)
