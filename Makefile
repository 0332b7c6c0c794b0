# Every target sets up what it needs. The environment is made anew when what it is made from changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLES := .venv-oracles
NATIVE := CMakeLists.txt $(shell find native -name '*.cc' -o -name '*.h')

.PHONY: setup demo test oracles test-long lint type test-native bench golden clean

setup: $(VENV)/.installed

# The compiled core is rebuilt by the same stamp, so an edit of native/ is never tested in an old build.
$(VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[torch,demo,test,lint]'
	touch $@

demo: setup
	$(BIN)/syncline demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_layers.py

type: setup
	$(BIN)/mypy

test-native: setup
	scripts/test_native_sanitized.sh

test: lint type test-native
	$(BIN)/pytest

# Made anew when its list changes; what is in it must not meet what is in the other environment.
$(ORACLES)/.installed: tests/oracles/requirements.txt
	rm -rf $(ORACLES)
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet -r $<
	touch $@

oracles: $(ORACLES)/.installed

test-long: setup oracles
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -m "slow or not slow"

bench: setup
	$(BIN)/syncline bench

golden: setup
	$(BIN)/python scripts/make_golden.py

clean:
	rm -rf $(VENV) $(ORACLES) build demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
