"""Caches outside of vLLM: what older weights computed must be forgotten there, too.

vLLM 0.32 resets its own caches. Of a KV connector without a `reset_cache` of its own it says that it was
reset, and connectors for outputs of encoders cannot be: what lies there would answer for new weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from syncline.errors import ConfigError


def refuse_lasting(vllm_config: Any) -> None:
    """Refuse a vLLM with an external cache that outlives a commit.

    Raises:
        ConfigError: it has one; says which, and what to do.
    """
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        name = vllm_config.ec_transfer_config.ec_connector
        raise ConfigError(
            f"outputs of encoders go through {name!r}, and vLLM has no way to make it forget those of older weights: "
            "start vLLM without --ec-transfer-config"
        )
    config = getattr(vllm_config, "kv_transfer_config", None)
    lasting = [] if config is None else sorted(set(_lasting(config)))
    if lasting:
        raise ConfigError(
            f"the KV connector {', '.join(lasting)} has no reset_cache, so that keys and values of older weights "
            "would be used with new ones: choose one that has, such as OffloadingConnector, or start vLLM without "
            "--kv-transfer-config"
        )


def _lasting(config: Any) -> Iterator[str]:
    """Yield the names of connectors that vLLM calls reset though they do nothing."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1 import (  # noqa: PLC0415
        KVConnectorBase_V1,
    )

    parts = config.kv_connector_extra_config.get("connectors")
    if parts is not None:
        for part in parts:
            yield from _lasting(KVTransferConfig(**part))
    elif (
        KVConnectorFactory.get_connector_class(config).reset_cache is KVConnectorBase_V1.reset_cache
    ):
        yield str(config.kv_connector)
