"""vLLM in this process: the plugin, the version that it is refused at, and syncs between two calls."""

from __future__ import annotations

import sys

import pytest

from syncline.errors import CommitError
from syncline.vllm import plugin, versions
from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.control import OfflineControl
from vllm_plugin import plugin_path
from vllm_serving import Trainer

PROMPT = [3 + (7 * i * i + 3 * i) % 90 for i in range(301)]
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}


@pytest.fixture(scope="module")
def offline(model, tmp_path_factory):
    """An LLM in this process, and a trainer that it follows."""
    directory = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*plugin_path(directory / "plugin"), *sys.path])
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM, plugins

        # Asked once in a process, and another test's engine may have been first.
        patch.setattr(plugins, "plugins_loaded", False)
        llm = LLM(str(model), weight_transfer_config={"backend": plugin.BACKEND}, **OPTIONS)
        yield llm, Trainer(model, directory / "run")
        llm.llm_engine.engine_core.shutdown()


def generated(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs[0]
    return list(found.token_ids), [(s.version, s.start, s.end) for s in found.weight_versions]


def test_registering_again_is_harmless(offline):
    plugin.register()
    plugin.register()


def test_commits_between_two_calls(offline):
    llm, trainer = offline
    for seed in (1, 2):
        version = trainer.step(seed)
        bring(OfflineControl(llm), str(trainer.store), version, CommitOptions())
        expected = trainer.tokens(version, PROMPT, 12)
        assert generated(llm) == (expected, [(str(version), 0, 12)])


def test_vllms_own_lifecycle(offline):
    llm, trainer = offline
    version = trainer.step(3)
    llm.init_weight_transfer_engine({"init_info": {"store": str(trainer.store)}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update(str(version))
    assert llm.reset_prefix_cache()
    expected = trainer.tokens(version, PROMPT, 12)
    assert generated(llm) == (expected, [(str(version), 0, 12)])
    llm.start_weight_update()
    with pytest.raises(CommitError, match="version 999 is not in this run"):
        llm.update_weights({"update_info": {"version": 999}})
    assert generated(llm) == (expected, [(str(version), 0, 12)])


def test_an_unknown_vllm_is_refused_when_the_worker_starts(offline, model, monkeypatch):
    import vllm

    from syncline.errors import TransportUnavailableError
    from syncline.vllm.engine import SynclineWeightTransferEngine

    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    with pytest.raises(TransportUnavailableError, match=f"run with .{versions.KNOWN[0]}"):
        SynclineWeightTransferEngine(None, None, None, None)


@pytest.mark.parametrize(
    "given", ["run", {}, {"store": 7}, {"store": "run", "more": 1}, ["store"]], ids=repr
)
def test_a_store_that_is_not_said_as_it_must_be_is_refused(given):
    from types import SimpleNamespace

    from syncline.errors import ConfigError
    from syncline.vllm.engine import _store_at_start

    with pytest.raises(ConfigError, match="additional_config: expected"):
        _store_at_start(SimpleNamespace(additional_config={"syncline": given}))
