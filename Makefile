# make demo: set up and compare the methods.   make test: set up, lint, types, tests, docs.
# make docs: the documentation as a site, in site/.
# make soak: an hour of a Flower federation whose processes are killed at random.
# make bench: everfed beside other simulators (each in its own environment), docs/benchmarks.md.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test docs soak bench lint types clean

demo: $(VENV)/.ready
	$(BIN)/everfed compare

test: lint types
	command -v google-chrome > /dev/null || scripts/system-packages chromium
	scripts/system-packages iproute2
	$(BIN)/pytest --ignore tests/deployment
	$(BIN)/pytest tests/deployment -n 0 -v
	$(MAKE) --no-print-directory docs

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

soak: $(VENV)/.ready
	$(BIN)/python tests/deployment/soak.py $(ARGS)

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/run.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "everfed needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info
