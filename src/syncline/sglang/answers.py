"""What a server says of itself, strictly read where Syncline relies on it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from syncline.errors import ConfigError, FormatError
from syncline.format import strict_json

MOST_RANKS = 4096
LIMIT_BYTES = 64 << 20
"""Longest answer that is read: checksums of some hundred thousand parameters."""

_OF_A_START = ("port", "random_seed", "nccl_port", "startup_time", "launch_command")
_CACHES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv")
_CHECKSUM = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Server:
    """One server, as `/server_info` and `/model_info` describe it.

    Attributes:
        version: release of SGLang.
        model_path: where it loaded its weights from last.
        label: the weight version that answers carry.
        tensor_ranks: how many ranks share a layer.
        replicas: data-parallel copies; `stages`: pipeline stages.
        draft: what speculates, None if nothing does.
        loaders: import paths that `--custom-weight-loader` allows.
        start: what tells one start of a server from the next, as far as this release says it.
        caches: settings of the server by which keys and values outlive a flush of its cache.
        moves_experts: it balances experts between ranks by itself, so that its checksums change with no update.
    """

    version: str
    model_path: str
    label: str
    tensor_ranks: int
    replicas: int
    stages: int
    draft: str | None
    loaders: tuple[str, ...]
    start: str
    caches: tuple[str, ...]
    moves_experts: bool

    def check_served(self) -> None:
        """Check that this kind of server can be kept exact.

        Raises:
            ConfigError: it has a draft model, several copies or stages of the model, or a cache that outlives
                an update.
        """
        if self.draft is not None:
            raise ConfigError(
                f"the server speculates with {self.draft}: its draft model would stay behind; start it without"
            )
        if self.replicas > 1 or self.stages > 1:
            raise ConfigError(
                f"the server has {self.replicas} data-parallel copies and {self.stages} pipeline stages, of which "
                "SGLang's own routes reach one; run one server for each copy"
            )
        if self.caches:
            raise ConfigError(
                f"the server keeps keys and values in a store of their own ({', '.join(self.caches)}), which a flush "
                "of its cache does not empty and which does not know weights apart: it would answer from old "
                "weights; start it without"
            )


@dataclass(frozen=True, slots=True)
class Checksums:
    """SGLang's own checksums.

    Attributes:
        ranks: of each rank, by name of its local parameter.
        engine: one over all of them.
    """

    ranks: tuple[Mapping[str, str], ...]
    engine: str


def server(server_info: bytes, model_info: bytes) -> Server:
    """Read the two descriptions.

    Raises:
        FormatError: a member is missing or of another type.
    """
    about = document(server_info, "/server_info")
    model = document(model_info, "/model_info")
    loaders = about.get("custom_weight_loader")
    draft = about.get("speculative_algorithm")
    if draft is not None and not isinstance(draft, str):
        raise FormatError(f"/server_info.speculative_algorithm: found {draft!r:.80}")
    listed = strict_json.items([] if loaders is None else loaders, "/server_info")
    return Server(
        _text(about, "version", "/server_info"),
        _text(model, "model_path", "/model_info"),
        _text(model, "weight_version", "/model_info"),
        _count(about, "tp_size"),
        _count(about, "dp_size"),
        _count(about, "pp_size"),
        draft,
        tuple(str(loader) for loader in listed),
        json.dumps([about.get(key) for key in _OF_A_START], sort_keys=True),
        tuple(name for name in _CACHES if about.get(name) not in (None, False)),
        about.get("enable_eplb", False) is not False or about.get("elastic_ep_backend") is not None,
    )


def checksums(raw: bytes) -> Checksums:
    """Read the answer of `/weights_checker`.

    Raises:
        FormatError: it denies success, has no checksums, or others than hexadecimal strings.
    """
    where = "/weights_checker"
    answer = document(raw, where)
    if answer.get("success") is not True:
        raise FormatError(f"{where}: expected success, found {answer!r:.200}")
    ranks = []
    for rank in strict_json.items(answer.get("ranks"), f"{where}.ranks"):
        found = strict_json.members(
            strict_json.members(rank, where).get("checksums"), f"{where}.checksums"
        )
        if not found or not all(map(_is_checksum, found.values())):
            raise FormatError(f"{where}: expected hexadecimal checksums, found {found!r:.200}")
        ranks.append(found)
    if not ranks:
        raise FormatError(f"{where}: expected the checksums of at least one rank, found none")
    engine = answer.get("per_engine_checksum")
    if not isinstance(engine, str) or not _is_checksum(engine):
        raise FormatError(
            f"{where}.per_engine_checksum must be a hexadecimal checksum, found {engine!r:.80}"
        )
    return Checksums(tuple(ranks), engine)


def check_not_denied(raw: bytes, where: str) -> None:
    """Check an answer that need not say anything, and may say that nothing was done.

    Raises:
        FormatError: it says so.
    """
    if not raw.lstrip().startswith(b"{"):
        return  # a sentence: the status of the answer is what counts
    answer = document(raw, where)
    if answer.get("success", True) is not True or answer.get("status", "ok") != "ok":
        raise FormatError(f"{where}: expected that it was done, found {answer!r:.300}")


def document(raw: bytes, where: str) -> dict[str, Any]:
    """Read a JSON object."""
    return strict_json.members(strict_json.parse(raw, where, limit_bytes=LIMIT_BYTES), where)


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


def _text(members: Mapping[str, Any], key: str, where: str) -> str:
    value = members.get(key)
    if not isinstance(value, str):
        raise FormatError(f"{where}.{key} must be a string, found {value!r:.80}")
    return value


def _count(members: Mapping[str, Any], key: str) -> int:
    value = members.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANKS:
        raise FormatError(
            f"/server_info.{key} must be a count from 1 to {MOST_RANKS}, found {value!r:.80}"
        )
    return value
