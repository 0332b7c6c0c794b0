"""Caches outside of vLLM that outlive a commit: vLLM's own connectors are told apart, and such an engine is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from syncline.errors import ConfigError
from syncline.vllm.external import refuse_lasting


def kv(name, **more):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **more)


def both(*names):
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return kv("MultiConnector", kv_connector_extra_config={"connectors": parts})


def test_an_engine_without_connectors_is_taken():
    refuse_lasting(SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None))


def test_a_connector_that_forgets_is_taken():
    refuse_lasting(SimpleNamespace(kv_transfer_config=kv("OffloadingConnector")))
    refuse_lasting(SimpleNamespace(kv_transfer_config=both("OffloadingConnector")))


@pytest.mark.parametrize("name", ["ExampleConnector", "DecodeBenchConnector"])
def test_a_connector_that_vllm_calls_reset_and_that_keeps_everything_is_refused(name):
    with pytest.raises(ConfigError, match=f"connector {name} has no reset_cache"):
        refuse_lasting(SimpleNamespace(kv_transfer_config=kv(name)))
    with pytest.raises(ConfigError, match=f"connector {name} has no reset_cache"):
        refuse_lasting(SimpleNamespace(kv_transfer_config=both("OffloadingConnector", name)))


def test_a_store_of_encoder_outputs_is_refused():
    from vllm.config import ECTransferConfig

    config = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    with pytest.raises(ConfigError, match="'ECExampleConnector', and vLLM has no way"):
        refuse_lasting(SimpleNamespace(ec_transfer_config=config))
