# Two commands for users: `make demo` and `make test`. The rest is for those who work on Ingot.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: all demo test lint types imports docs check bench fuzz clean

all: $(VENV)/.installed

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.7' cmake ninja
	touch $@

NATIVE := CMakeLists.txt pyproject.toml $(shell find native -type f)

$(VENV)/.installed: $(VENV)/.created $(NATIVE)
	$(PIP) install --no-build-isolation --editable .
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) install --no-build-isolation --editable '.[test]'
	touch $@
