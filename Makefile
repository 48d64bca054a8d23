# `make test` and `make demo` do all set-up themselves; they need Python 3.11 or newer.
#   make PYTHON=python3.12       another interpreter
#   make TORCH_INDEX=URL         a further package index, of CPU builds of torch, say

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
# examples/minimal is what `topkv new` writes; its test installs it where nothing else is.
PROJECTS := $(wildcard plugins/*/pyproject.toml tools/*/pyproject.toml) examples/arkvale/pyproject.toml
NAMES = $(shell sed -n 's/^name = "\(.*\)"/\1/p' $(PROJECTS))
# Modules are compiled when they are imported first, which most of torch's never are, and kept for the
# hundreds of processes that tests start, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt
# Of tests that start a real store; those are skipped where it is missing.
STORES := 'mooncake-transfer-engine-non-cuda; sys_platform == "linux" and python_version < "3.14"'
SOURCES := $(wildcard core plugins tools tests benchmarks examples docs/scripts conftest.py)
DOCS := build/docs
# What the interpreter launches is handed to the compiler for a GPU too, which needs none.
INTERPRET := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --compile-for 90

.PHONY: all environments test test-slow test-models test-commit test-oldest newest test-nightly test-gpu test-vllm test-sglang demo docs lint types check isolation newcomer dist format clean

all: check

# An environment with torch, which alone takes most of the time.
define WITH_TORCH
@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
    f"topkv needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; make PYTHON=python3.12, say")'
$(PYTHON) -m venv $(VENV)
$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
endef

# First the packages, by one build backend for all, then what they need.
$(VENV)/.installed: constraints.txt core/pyproject.toml $(PROJECTS)
	$(WITH_TORCH)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --no-deps -e core $(patsubst %/pyproject.toml,-e %,$(PROJECTS))
	$(PIP) 'topkv[cli,testing,triton]' $(NAMES) \
	    accelerate gguf matplotlib pytest pytest-timeout pytest-xdist ruff mypy $(STORES)
	touch $@

test: $(VENV)/.installed
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} \
	    $(INTERPRET) --dist loadfile -m 'not gpu and not models and not slow and not nightly' $(ARGS)

# What takes long: plugins and engines that are broken on purpose, each of which the kit has to fail; the
# kit over plugins that templates and pages make; kernels of most plugins in the interpreter; blocks of
# pages; random lives; stores whose processes are killed, and other processes that go on from them.
test-slow: $(VENV)/.installed
	$(INTERPRET) --dist load -m 'not gpu and not models and slow and not nightly' $(ARGS)

# Every model class that is served, beside its stock model.
test-models: $(VENV)/.installed
	$(INTERPRET) --dist load -m 'not gpu and models' plugins/transformers $(ARGS)

# These three in one run, which collects once and keeps both cores busy to the end.
test-commit: $(VENV)/.installed
	$(INTERPRET) --dist worksteal -m 'not gpu and not nightly' $(ARGS)

# The engine of Transformers with the oldest version that it takes, laid over the environment of the tests, and
# adapters of PEFT, whose newest release that version takes.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' plugins/transformers/pyproject.toml)
OLD := build/transformers-$(OLDEST)

$(OLD)/.installed: $(VENV)/.installed plugins/transformers/pyproject.toml
	rm -rf $(OLD)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --target $(OLD) 'transformers==$(OLDEST).*'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --target $(OLD) --no-deps \
	    -c constraints.txt peft accelerate psutil
	touch $@

test-oldest: $(OLD)/.installed
	PYTHONPATH=$(CURDIR)/$(OLD) $(INTERPRET) --dist loadfile -m 'not gpu and not models and not slow and not nightly' \
	    $(or $(ARGS),$(addprefix plugins/transformers/tests/test_,$(ENGINE:=.py)))

# What looks into Transformers: forwards, generate, caches, refusals; at night captured and compiled steps and sessions too.
ENGINE := blocks engine_calls engine_equality left_out models watch

# The newest release of everything, whatever bounds say; what it finds is no failure of a commit.
newest: dist
	$(BIN)/python -m tests.packaging.newest $(ARGS)

# Hours, at night and before a release: many more examples and longer histories, with seeds that differ
# from night to night, training recipes, and an older vLLM that is served.
test-nightly: $(VENV)/.installed
	HYPOTHESIS_PROFILE=nightly $(INTERPRET) --dist worksteal -m 'not gpu' $(ARGS)
	$(MAKE) test-oldest ENGINE='capture compiled engine_modes model_lives prefixes'
	$(MAKE) test-vllm VLLM_TESTS=
	VLLM=0.31.0 $(MAKE) test-vllm VLLM_TESTS=
	$(MAKE) test-sglang SGLANG_TESTS=

# On a machine with a CUDA device, with the packages installed.
test-gpu:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 6 --dist worksteal -m gpu $(ARGS)

# Of topkv-vllm, beside stock vLLM on a CPU, with the newest version that it takes or VLLM=VERSION, in an
# environment of their own: build/vllm, 4 GB. VLLM_TESTS= for those of the night too.
test-vllm: VLLM_TESTS = -m 'not nightly'
test-vllm:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) plugins/vllm/test.sh $(VLLM_TESTS) $(ARGS)

# Of topkv-sglang, beside stock SGLang on a CPU, in an environment of their own: build/sglang, 2 GB.
# SGLANG_TESTS= for those of the night too.
test-sglang: SGLANG_TESTS = -m 'not nightly'
test-sglang:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) plugins/sglang/test.sh $(SGLANG_TESTS) $(ARGS)

# All environments of a commit; with -j at once, for each installs with one core.
environments: $(VENV)/.installed $(OLD)/.installed $(DOCS)/.installed build/vllm/.installed build/sglang/.installed

build/vllm/.installed: plugins/vllm/test.sh plugins/vllm/pyproject.toml
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) plugins/vllm/test.sh environment

build/sglang/.installed: plugins/sglang/test.sh plugins/sglang/pyproject.toml
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) plugins/sglang/test.sh environment

# What builds and checks distributions, beside what runs tests.
$(VENV)/.packaging: $(VENV)/.installed
	$(PIP) hatchling twine
	touch $@

# Every package from its wheel, in an environment of its own; ARGS=topkv-quest for one of them.
isolation: dist
	$(BIN)/python -m tests.packaging.isolation $(ARGS)

# The README from its install to a plugin of one's own, as somebody new does it, timed.
newcomer: $(VENV)/.installed
	$(BIN)/python -m tests.packaging.newcomer $(ARGS)

# Sdists and wheels of all packages into dist/, looked at from all sides.
dist: $(VENV)/.packaging
	$(BIN)/python -m tests.packaging.dist

# What the demo needs and no more; where the environment of the tests is there, that serves.
DEMO := core tools/authoring tools/cli tools/evaluation tools/prediction tools/prefixes plugins/quest plugins/triton_attention plugins/transformers
READY := $(or $(wildcard $(VENV)/.installed),$(VENV)/.demo)

$(VENV)/.demo: constraints.txt $(DEMO:%=%/pyproject.toml)
	$(WITH_TORCH)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation $(DEMO:%=-e %)
	touch $@

demo: $(READY)
	$(BIN)/topkv demo $(ARGS)

# The site, in build/site. It has an environment of its own: its pages need neither torch nor topkv.
$(DOCS)/.installed: constraints.txt docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
	    -r docs/requirements.txt
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python -m pytest -q tests/test_lengths.py tests/test_imports.py

types: $(VENV)/.installed
	$(BIN)/mypy

check: test test-slow lint types

format: $(VENV)/.installed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
