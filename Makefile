# The verbs of this project. Each sets up what it needs; `make demo` is the place to begin.

VENV := .venv
BIN := $(VENV)/bin
# What running needs is installed, and what development needs besides.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
MODEL ?= models/baton-py-6m
# MODEL=smol is a published model, which `make smol` fetches.
SMOL := models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf
ifeq ($(MODEL),smol)
override MODEL := $(SMOL)
FETCHED := $(SMOL)
endif
ARGS ?=
TRACE ?=
# One thread for each worker of xdist and each process of a test: more would spin while they wait for a core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# Every process that a test or a bench starts would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo serve smol test test-fast explore check protos docs pages bench bench-peers locks sbom audit test-images test-chart clean

help:
	@echo "make demo               serve the bundled model, stream a completion, print each tier's timing"
	@echo "make serve MODEL=...    start all tiers (ARGS= adds options, see baton serve --help)"
	@echo "make smol               fetch SmolLM2-135M-Instruct, a GGUF file: MODEL=smol in make demo and make serve"
	@echo "make test               run the tests, and name the slowest (ARGS= adds pytest's options)"
	@echo "make test-fast          run those of them that are not slow, with few examples of each property"
	@echo "make explore            run the simulations and properties by examples that nobody has seen"
	@echo "make check              lint, formatting, types, import directions, protos"
	@echo "make protos             generate baton/v1 and gateway/openengine/v1 from protos/"
	@echo "make docs               build the site of docs/ into site/"
	@echo "make pages              generate docs/openai.md, wrap prose"
	@echo "make bench              measure for twenty minutes, rewrite docs/performance.md (ARGS=, TRACE=FILE)"
	@echo "make bench-peers        build llama.cpp, for each CPU level, and the models that make bench compares"
	@echo "make test-images        build the images, run and break compose.yaml (ARGS=--install, --cuda, --quick)"
	@echo "make test-chart         render the chart by helm and check it against the schemas of Kubernetes"
	@echo "make locks              write deploy/locks: versions and hashes of what the images install"
	@echo "make sbom               write sbom/: what the images install, as CycloneDX"
	@echo "make audit              ask for known vulnerabilities of what the images install"
	@echo "make venv               set up .venv with all that development needs"

venv: $(STAMP)

$(RUNS): pyproject.toml client/pyproject.toml scripts/venv.sh
	@scripts/venv.sh $(VENV) run
	@touch $@

$(STAMP): $(RUNS)
	@scripts/venv.sh $(VENV) dev
	@touch $@

smol: $(SMOL)

$(SMOL): | $(RUNS)
	@scripts/smol.sh $@

demo: $(RUNS) $(FETCHED)
	@$(BIN)/python scripts/demo.py --model $(MODEL)

serve: $(RUNS) $(FETCHED)
	@$(BIN)/baton serve $(ARGS) -- $(MODEL)

test: $(STAMP)
	@$(PYTEST) --durations=20 --durations-min=1 $(ARGS)

test-fast: $(STAMP)
	@$(PYTEST) -m "not slow" --hypothesis-profile="few examples" $(ARGS)

explore: $(STAMP)
	@first_seed=$$(shuf -i 3000000-1999999999 -n 1) && echo "--first-seed $$first_seed --num-seeds 40" && \
	$(PYTEST) tests/sim/test_chaos.py tests/sim/test_mix.py tests/sim/test_cores.py \
	    --first-seed $$first_seed --num-seeds 40 && \
	$(PYTEST) --hypothesis-profile="many examples" -m "not long" $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against tests/frozen/0.1.0/protos.binpb
	$(BIN)/python scripts/protos.py --check
	$(BIN)/python scripts/docs.py --check

protos: $(STAMP)
	$(BIN)/python scripts/protos.py

docs: $(STAMP)
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install --quiet $$($(BIN)/python -c \
	    'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

pages: $(STAMP)
	$(BIN)/python scripts/docs.py
	$(BIN)/python scripts/wrap.py

bench: $(STAMP)
	$(BIN)/python -m bench.suite $(if $(TRACE),--trace $(TRACE)) $(ARGS)

bench-peers: $(STAMP)
	@levels=$$($(BIN)/python -c 'from baton_kernels.cpu.library import levels_of_machine; print(*levels_of_machine()[1:])') && \
	for level in "" $$levels; do BATON_CPU_LEVEL=$$level bench/peers/setup.sh || exit 1; done
	$(BIN)/python -m bench.peers.models

test-images: $(STAMP)
	@$(BIN)/python -u scripts/test_images.py $(ARGS)

test-chart: $(STAMP)
	@$(BIN)/python scripts/test_chart.py $(ARGS)

locks: $(STAMP)
	$(BIN)/python scripts/locks.py

sbom audit: $(STAMP)
	$(BIN)/python scripts/supply.py $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
