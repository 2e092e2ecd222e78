# make demo    label the demo documents with SmolLM2 on this machine
# make test    run the CPU test suite with coverage
# make test-sglang  run the tests of the SGLang backend on the CPU, with each supported release in an environment of its own
# make check   ruff and mypy
# Each makes its own .venv first. Another interpreter: make test PYTHON=/path/to/python3.12

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)

# SGLang's side environments see what is installed in .venv and hold only what differs.
SGLANG_RELEASES := 0.5.15.post1 0.5.23
SGLANG_TESTS := tests/engine/sglang
SGLANG_READY := $(SGLANG_RELEASES:%=.venv-sglang-%/.ready)

.PHONY: demo test test-sglang $(SGLANG_RELEASES:%=test-sglang-%) check clean

demo: $(READY)
	rm -rf out/demo
	$(BIN)/askmany run jobs/demo/config.yaml

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 --cov --cov-report=term:skip-covered

test-sglang: $(SGLANG_RELEASES:%=test-sglang-%)

$(SGLANG_RELEASES:%=test-sglang-%): test-sglang-%: .venv-sglang-%/.ready
	.venv-sglang-$*/bin/python -m pytest -q --timeout=300 $(SGLANG_TESTS)

$(SGLANG_READY): .venv-sglang-%/.ready: $(SGLANG_TESTS)/requirements.txt $(SGLANG_TESTS)/requirements-%.txt $(READY)
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(BIN)/python -m pip --disable-pip-version-check --python $(@D)/bin/python install --quiet --no-deps \
		-r $(SGLANG_TESTS)/requirements.txt -r $(SGLANG_TESTS)/requirements-$*.txt
	touch $@

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
	rm -rf $(VENV) .venv-sglang-* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
