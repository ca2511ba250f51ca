# Everything a newcomer needs. Relative paths throughout, so that the checkout may lie anywhere.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# TRL, which two benchmarks compare with, in an environment of its own.
PEERS := .venv-peers
PEERS_LOCK := requirements/peers.txt
# Further arguments for pip. Where PyPI's torch is the CUDA build, take the CPU build instead:
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# Processes that run the tests.
TEST_WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup peers quickstart real gsm8k test chaos mutate lint format docs clean

help: ## Show this list.
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## Create .venv and install the pinned packages and this project (minutes, 3.3 GB; once).

peers: $(PEERS)/.packages ## Create .venv-peers with TRL, for the benchmarks that compare with it (a minute, 1.5 GB; once).

quickstart: setup ## Teach a tiny model arithmetic with a real vLLM engine: under five minutes on two cores.
	$(BIN)/async-rl quickstart

real: setup ## Teach SmolLM2-135M arithmetic in words: under twenty minutes on two cores.
	$(BIN)/async-rl real

gsm8k: setup ## Evaluate SmolLM2-135M on 100 GSM8K problems with the math reward (evaluation only).
	$(BIN)/python -m async_rl.recipes.gsm8k

# Several processes, a file of tests in one of them. Tests of real processes with real deadlines can disturb each other on
# few cores: what failed (exit code 1, nothing else) is run once more, alone, and that decides. Both reports are shown.
# In the order of their folders, since the files of the end-to-end tests are few and long and must not begin last.
test: setup ## Run all tests, fast and slow.
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || { code=$$?; \
		[ $$code = 1 ] || exit $$code; \
		echo "Once more, alone, what failed:"; \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(PYTEST_ARGS); }

chaos: setup ## Kill, stop, cut off, add and remove generators while a run trains; then check the account (under twenty minutes).
	$(BIN)/python -m benchmarks.chaos $(CHAOS_ARGS)

mutate: setup ## Break the formulas one by one and see that the tests notice (tens of minutes).
	$(BIN)/python -m tests.mutate

lint: setup ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Apply the style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Write the generated pages of docs/.
	$(BIN)/python -m async_rl.pages docs

clean: ## Remove the environment and caches.
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The project itself: installed again when its metadata changes.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# The pinned packages: installed again when the lock changes. --no-deps, because the lock is complete and leaves out
# packages that vLLM names but does not need here, some of which do not load beside this torch.
$(VENV)/.packages: $(LOCK)
	@command -v "$(PYTHON)" >/dev/null || { echo 'error: no $(PYTHON) here; name a Python 3.11 or newer: make setup PYTHON=/path/to/python'; exit 2; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "error: $(PYTHON) is Python %d.%d, async_rl needs 3.11 or newer: make setup PYTHON=python3.11" % v[:2])'
	@"$(PYTHON)" -m venv $(VENV)
	@echo "Installing $$(wc -l < $(LOCK)) pinned packages into $(VENV): about two to four minutes, 3.3 GB ..."
	@$(PIP) install --no-deps $(PIP_ARGS) -r $(LOCK)
	@touch $@

$(PEERS)/.packages: $(PEERS_LOCK)
	@command -v "$(PYTHON)" >/dev/null || { echo 'error: no $(PYTHON) here; name a Python 3.11 or newer: make peers PYTHON=/path/to/python'; exit 2; }
	@"$(PYTHON)" -m venv $(PEERS)
	@echo "Installing $$(wc -l < $(PEERS_LOCK)) pinned packages into $(PEERS): about a minute, 1.5 GB ..."
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input -qq install --no-deps $(PIP_ARGS) -r $(PEERS_LOCK)
	@touch $@
