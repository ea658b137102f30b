# Every target makes .venv and installs what it needs, once: a stamp is renewed when pyproject.toml or constraints.txt change.
PYTHON ?= python3
JOBS   ?= auto

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread per process: the tests run one process per core.
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow test-oldest test-newest test-wheel test-peers lint format bench docs gallery clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

# Nothing is selected on the rows that are shown: priors and random layers are selected on held-out training rows.
demo: $(STAMPS)/test  ## compare five methods on 179 handwritten digits, in about two minutes: demo-output/report.html
	rm -rf demo-output
	$(BIN)/bayou compare digits-few --methods mle,map,ensemble,nodeflow,mnf --steps 600 --out demo-output

test: $(STAMPS)/test  ## run the tests, without the slow ones
	$(SINGLE) $(BIN)/python -m pytest -n $(JOBS) --maxprocesses=8 --dist worksteal $(ARGS)

test-slow: $(STAMPS)/test $(STAMPS)/peers $(STAMPS)/lint  ## run the slow tests
	$(SINGLE) SCIPY_ARRAY_API=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses=8 --dist worksteal -m slow $(ARGS)

test-oldest:  ## run the tests with the oldest torch that pyproject.toml allows, in a .venv-oldest of its own
	$(PYTHON) -m venv .venv-oldest
	sed 's/^torch==.*/torch==2.9.0/' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt -e '.[test]'
	$(SINGLE) .venv-oldest/bin/python -m pytest -n $(JOBS) --maxprocesses=8 --dist worksteal $(ARGS)

test-newest:  ## run the tests with the newest torch there is, in a .venv-newest of its own
	$(PYTHON) -m venv .venv-newest
	sed '/^torch==/d; /^setuptools==/d' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -c .venv-newest/constraints.txt -e '.[test]' torch
	$(SINGLE) .venv-newest/bin/python -m pytest -n $(JOBS) --maxprocesses=8 --dist worksteal $(ARGS)

test-wheel: $(STAMPS)/test  ## build the wheel, install it with the lab extra into an empty .venv-wheel, and use it there as a reader of the README does
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[lab]"
	cd .venv-wheel && bin/python ../tests/packaging/first_use.py

test-peers: $(STAMPS)/test $(STAMPS)/peers  ## run the tests that need other libraries (curvlinops, ArviZ, Lightning, ...)
	$(SINGLE) SCIPY_ARRAY_API=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses=8 --dist worksteal -m "peers and not slow" $(ARGS)

lint: $(STAMPS)/test $(STAMPS)/lint  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMPS)/lint  ## let ruff sort the imports and format the code
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

bench: $(STAMPS)/test $(STAMPS)/bench  ## measure the flows against other libraries, and what it costs to be Bayesian
	$(BIN)/python experiments/measure/flows.py $(ARGS)
	$(BIN)/python experiments/measure/posteriors.py
	$(BIN)/python experiments/measure/laplace.py

docs: $(STAMPS)/test $(STAMPS)/docs  ## build the documentation to docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

gallery: $(STAMPS)/test $(STAMPS)/peers  ## run the examples whose code has changed, for the gallery of the docs
	$(BIN)/python -m docs.make_gallery $(ARGS)

clean:  ## remove what the targets wrote, but keep .venv
	rm -rf build dist demo-output docs/_build docs/_generated docs/gallery/*.md docs/gallery/*.ipynb .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-wheel

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "bayou needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." \
	         "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/test: EXTRA := -e '.[test]'
$(STAMPS)/lint: EXTRA := -e '.[lint]'
$(STAMPS)/docs: EXTRA := -e '.[docs]'
$(STAMPS)/bench: EXTRA := -e '.[bench]'
# These ask for torchvision, whose CUDA build breaks a CPU torch: their light dependencies are named one by one.
$(STAMPS)/peers: EXTRA := -e '.[peers]' && $(PIP) --no-deps curvlinops-for-pytorch laplace-torch asdfghjkl backpack-for-pytorch unfoldNd bayesian-torch einconv einops linear_operator opt_einsum
$(STAMPS)/%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(EXTRA)
	@mkdir -p $(STAMPS) && touch $@
