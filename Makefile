# Everything runs in a virtual environment that make creates: .venv
#
#   make demo                     install, fetch the small default model, answer a prompt by speculative decoding
#   make test                     the default test suite (no model, no GPU, no internet beyond package installation)
#   make TORCH_INDEX=URL demo     take torch from another package index, e.g. PyTorch's own for CPU or for another CUDA
#   make PYTHON=python3.12 demo   another interpreter
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
TARGET ?= smollm2-135m
DRAFT ?= ngram
UP_FLAGS ?=
MODEL_TESTS ?= tests
CHAOS_FLAGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard proto/outrider/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-model test-drafts test-doors test-cluster chaos fuzz check format proto bench up down clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

install: $(INSTALLED)  ## Create .venv with everything in it (the other targets do so by themselves).

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "[install] packages into $(VENV) (once; see constraints.txt for the versions)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[all,dev]'
	@touch $@

demo:  ## Install, fetch the default model and show speculative decoding at work.
	@echo "make demo: speculative decoding over gRPC, on this machine, with a small real model"
	@echo "  downloads  Python packages for $(VENV): about 0.5 GB with a CPU build of torch, 3 GB with the CUDA build that pip"
	@echo "             takes on Linux by default (make TORCH_INDEX=... chooses); the model: 0.1 to 0.3 GB, once per user"
	@echo "  disk       about 2 GB (CPU) or 8 GB (CUDA) for $(VENV); 0.3 GB for the model"
	@echo "  memory     under 4 GB"
	@echo "  time       3 to 15 minutes the first time, depending on the network; 1 to 2 minutes after that"
	@$(MAKE) --no-print-directory install
	@$(BIN)/outrider demo

test: $(INSTALLED)  ## The default suite: nine minutes on two slow cores, not timed in two workers on faster ones.
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/service tests/e2e -m "not model and not gpu and not drafts"

test-model: $(INSTALLED)  ## The bars on the default model: ten minutes on two cores with AVX-512, half an hour without.
	$(BIN)/python -m pytest $(MODEL_TESTS) -m "model and not gpu and not long"

test-drafts: $(INSTALLED)  ## Exactness over every kind of draft, random requests among them: a few minutes on two cores.
	$(BIN)/python -m pytest tests/unit tests/service -m drafts

test-cluster: $(INSTALLED)  ## Deployment on a Ray cluster of several nodes on this machine: about five minutes.
	$(BIN)/python -m pytest tests/chaos -m cluster

chaos: $(INSTALLED)  ## Parts fail under load, each kind once: about 10 minutes. CHAOS_FLAGS="--chaos-times 10 --chaos-requests 500" is the full form.
	$(BIN)/python -m pytest tests/chaos -m chaos -s $(CHAOS_FLAGS)

fuzz: $(INSTALLED)  ## 10,000 random requests at the HTTP door, then schemathesis on its schema: about five minutes.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.chaos.fuzz_http --count 10000 --schema 50

test-doors: $(INSTALLED)  ## 100,000 malformed messages, every wrong client, 10,000 open connections: half an hour on two cores.
	$(BIN)/python -m tests.chaos.fuzz
	$(BIN)/python -m tests.chaos.doors

check: $(INSTALLED)  ## What CI runs before the tests: format, lint, types, import rules, stale stubs.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_protos.py

format: $(INSTALLED)  ## Format the code and mend what the linter can mend.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(INSTALLED)  ## Write the gRPC stubs under outrider/v1 from proto/.
	$(BIN)/python tools/check_protos.py --write

bench: $(INSTALLED)  ## The scripts behind the figures, about 25 minutes on an idle machine (bench/README.md).
	@for script in wire_cost coordinator_cost feature_cost stack_memory ragged_forward pair_speed; do \
	  echo "== bench/$$script.py"; PYTHONPATH=. $(BIN)/python bench/$$script.py || exit 1; done

up: $(INSTALLED)  ## Serve: make up TARGET=... DRAFT=... UP_FLAGS="--port 8001".
	@$(BIN)/outrider up --target $(TARGET) --draft $(DRAFT) $(UP_FLAGS)

down: $(INSTALLED)  ## Stop what `make up` started.
	@$(BIN)/outrider down

clean:  ## Remove .venv and caches (downloaded models stay in the user's cache).
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
