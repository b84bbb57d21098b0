# Every target makes sure that the environment stands (scripts/run.py), then runs one command in it.
#   ARGS=...      passed on to the command      make test ARGS="-k windows"
#   COMFYUI=...   use this ComfyUI release      make test COMFYUI=0.16.3
#   PYTHON=...    Python that makes it all      make test PYTHON=python3.12
PYTHON ?= python3
ARGS ?=
RUN = $(PYTHON) -m scripts.run $(if $(COMFYUI),--comfyui $(COMFYUI)) --
TOOL = $(PYTHON) -m scripts.run --quiet --
# Tests use one thread each and every core together; more than four models in memory at once slow them down.
PYTEST = OMP_NUM_THREADS=1 $(RUN) python -m pytest -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup test test-all api-check compatibility fuzz soak demo bench bench-gpu gpu-kit fidelity pack lint format types clean purge

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\n  ARGS="..." is passed on, COMFYUI=0.16.3 picks a ComfyUI release, PYTHON=... the Python to start from.\n'

setup: ## find or get ComfyUI and make the environment (every other target does this first)
	@$(RUN) python -c ""

test: ## the tests that find most, 10 minutes on two cores; ARGS="-k windows", ARGS=tests/server
	@$(PYTEST) $(ARGS)

test-all: ## all tests: also servers, the web page, compiled and full-size models; ARGS="--tiers only" without the others
	@$(PYTEST) --tiers all $(ARGS)

api-check: ## what the pack uses of a ComfyUI, and what of that is missing or changed; ARGS=FOLDER, also with some files only
	@$(TOOL) python -m scripts.api_check $(ARGS)

compatibility: ## try every feature of ComfyUI beside ToMA, 5 minutes, and write docs/compatibility.md
	@TOMA_WRITE_COMPATIBILITY=1 $(RUN) python -m pytest tests/compatibility $(ARGS)

fuzz: ## 10,000 cases of settings, shapes, prompts and damaged files, an hour; TOMA_FUZZ=300 tries fewer
	@TOMA_FUZZ=$${TOMA_FUZZ:-10000} $(RUN) python -m pytest -o faulthandler_timeout=7200 tests/stress/test_fuzz.py tests/stress/test_damaged.py $(ARGS)

soak: ## 300 prompts over one server, each compared with a process of its own, 20 minutes; TOMA_SOAK=30 sends fewer
	@TOMA_SOAK=$${TOMA_SOAK:-300} $(RUN) python -m pytest -s -o faulthandler_timeout=7200 tests/stress/test_soak.py $(ARGS)

demo: ## run real models with and without ToMA and compare; ARGS=--serve opens the web page
	@$(RUN) python -m demo $(ARGS)

bench: ## time ToMA and its rivals on this machine, 15 minutes, about 10 GB of memory; ARGS=--help
	@$(RUN) python -m benchmarks.suite $(ARGS)

bench-gpu: ## the same for a GPU, 12 minutes, 45 GB of its memory; ARGS=--dry-run goes the same way without one
	@$(RUN) python -m benchmarks.suite --gpu $(ARGS)

gpu-kit: ## pack what a GPU machine without network needs into .gpu/, 8 MB; says how much travels
	@$(TOOL) python -m scripts.gpu_kit $(ARGS)

fidelity: ## measure merged pictures of the trained tiny models; hours on a CPU, resumable; ARGS=--help
	@$(RUN) python -m benchmarks.fidelity $(ARGS)

pack: ## validate and make the registry's archive in build/, as publishing does
	@$(TOOL) python -m scripts.archive $(ARGS)

lint: ## ruff: rules and formatting, nothing is changed
	@$(TOOL) python -m ruff check $(ARGS)
	@$(TOOL) python -m ruff format --check $(ARGS)

format: ## ruff: format the files and fix what can be fixed
	@$(TOOL) python -m ruff check --fix --exit-zero $(ARGS)
	@$(TOOL) python -m ruff format $(ARGS)

types: ## mypy: strict in toma_core and scripts
	@$(TOOL) python -m scripts.typecheck $(ARGS)

clean: ## remove caches and what was made inside this checkout: .gpu/, build/, demo-output/
	rm -rf .gpu .hypothesis .mypy_cache .pytest_cache .ruff_cache build demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

purge: clean ## remove the environments and ComfyUI downloads too (several GB)
	@$(PYTHON) -m scripts.run --purge
