# Every target sets up what it needs. The environment is made anew when what it is made from changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CROSS := .venvs/cross
ORACLES := .venvs/oracles
BRIDGE := .venvs/bridge
VLLM := .venvs/vllm
SGLANG := .venvs/sglang
PEERS := .venvs/peers
LAST_HOP := .venvs/last-hop
NATIVE := CMakeLists.txt $(shell find native -name '*.cc' -o -name '*.h')

.PHONY: setup cross-env oracles vllm-env vllm-smoke test-vllm sglang-env sglang-smoke test-sglang peers-env last-hop-env shards demo demo-vllm demo-sglang test test-long test-gpu lint type test-native bench golden clean

setup: $(VENV)/.installed

# The compiled core is rebuilt by the same stamp, so an edit of native/ is never tested in an old build.
$(VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), some 3 GB with torch: minutes, and silent"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[torch,demo,interchange,test,lint]'
	touch $@

# What the tests read and write across with, in an environment of its own; it sees the packages of $(VENV).
cross-env: $(CROSS)/.made-from

$(CROSS)/.made-from: $(VENV)/.installed scripts/cross_env.sh scripts/environment.sh tests/cross/imports.txt tests/cross/packages.txt
	scripts/cross_env.sh $(BIN)/python $(CROSS)

# vLLM on a CPU, in an environment of its own; it sees the packages of $(VENV).
vllm-env: $(VLLM)/.made-from

$(VLLM)/.made-from: $(VENV)/.installed scripts/vllm_env.sh scripts/environment.sh
	scripts/vllm_env.sh $(BIN)/python $(VLLM)

# SGLang on a CPU, likewise.
sglang-env: $(SGLANG)/.made-from

$(SGLANG)/.made-from: $(VENV)/.installed scripts/sglang_env.sh scripts/environment.sh $(wildcard scripts/sglang_cpu/*.py)
	scripts/sglang_env.sh $(BIN)/python $(SGLANG)

# Mooncake and NIXL, in an environment of their own; it sees the packages of $(VENV).
peers-env: $(PEERS)/.made-from

$(PEERS)/.made-from: $(VENV)/.installed scripts/peers_env.sh scripts/environment.sh tests/peers/packages.txt
	scripts/peers_env.sh $(BIN)/python $(PEERS)

# checkpoint-engine, likewise; its tests are in `make test-long` alone.
last-hop-env: $(LAST_HOP)/.made-from

$(LAST_HOP)/.made-from: $(VENV)/.installed scripts/last_hop_env.sh scripts/environment.sh tests/last_hop/packages.txt
	scripts/last_hop_env.sh $(BIN)/python $(LAST_HOP)

# The real server, one start of it and minutes; `test-sglang` starts one for each model and number of ranks, and a vLLM.
sglang-smoke: sglang-env
	$(SGLANG)/bin/python -m pytest tests/sglang/test_environment.py tests/sglang/test_buckets.py tests/sglang/test_loaders.py tests/sglang/test_real_server.py

test-sglang: sglang-env vllm-env
	$(SGLANG)/bin/python -m pytest -m "not gpu" tests/sglang

demo: setup
	$(BIN)/syncline demo

demo-vllm: vllm-env
	$(VLLM)/bin/python -m syncline.cli demo --engine vllm

demo-sglang: sglang-env
	$(SGLANG)/bin/python -m syncline.cli demo --engine sglang

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_layers.py

type: setup
	$(BIN)/mypy

test-native: setup
	scripts/test_native_sanitized.sh
	scripts/test_native_fuzz.sh

test: lint type test-native cross-env peers-env vllm-smoke sglang-smoke
	$(BIN)/pytest

# Real vLLM on this CPU; engines are shared between tests, and its own warnings are not ours.
VLLM_TESTS := $(VLLM)/bin/python -m pytest -o filterwarnings=default -o faulthandler_timeout=900 tests/vllm

vllm-smoke: vllm-env
	$(VLLM_TESTS)

test-vllm: vllm-env
	$(VLLM_TESTS) -m "not gpu"

# Made anew when its list changes; what is in it must not meet what is in the other environment.
$(ORACLES)/.installed: tests/oracles/requirements.txt
	rm -rf $(ORACLES)
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet -r $<
	touch $@

# megatron-bridge and a newer megatron-core, which must not meet those either; it sees the packages of $(VENV).
$(BRIDGE)/.made-from: $(VENV)/.installed scripts/bridge_env.sh scripts/environment.sh
	scripts/bridge_env.sh $(BIN)/python $(BRIDGE)

oracles: $(ORACLES)/.installed $(BRIDGE)/.made-from

# Raw shards of Megatron as the tests read them, made anew; minutes.
shards: oracles
	$(ORACLES)/bin/python tests/oracles/make_shards.py shards

test-long: setup cross-env peers-env last-hop-env oracles
	scripts/test_native_fuzz.sh 120
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -m "not gpu"

test-gpu: setup
	$(BIN)/pytest -m gpu
	$(BIN)/python benchmarks/gpu.py

bench: setup
	$(BIN)/syncline bench

golden: setup
	$(BIN)/python scripts/make_golden.py

clean:
	rm -rf $(VENV) $(CROSS) $(ORACLES) $(BRIDGE) $(VLLM) $(SGLANG) $(PEERS) $(LAST_HOP) build demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
