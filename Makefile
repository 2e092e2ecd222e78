# make demo    label the demo documents with SmolLM2 on this machine
# make test    run the CPU test suite with coverage
# make check   ruff and mypy
# Each makes its own .venv first. Another interpreter: make test PYTHON=/path/to/python3.12

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)

.PHONY: demo test check clean

demo: $(READY)
	rm -rf out/demo
	$(BIN)/askmany run jobs/demo/config.yaml

test: $(READY)
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -m askmany -p askmany.kernels -p askmany.engine -p askmany.pipeline -p askmany.jobs

$(READY): pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "askmany needs Python 3.11 or 3.12; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "askmany needs Python 3.11 or 3.12; $(PYTHON) is another" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints-cpu.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
