"""The Triton kernels where there is no GPU: interpreted against the reference, and compiled for sm_70.

They need triton 3.6.0 (later ones cannot disassemble sm_70), which stock vLLM's environment must not have: so they run in
an environment of their own, $SM70_TRITON_PYTHON or one made in the cache folder if $SM70_DOWNLOAD or $CI is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NEEDS = ("torch==2.13.0", "triton==3.6.0", "numpy", "pytest", "safetensors")
# Interpreted: 21 shapes x 2, all scales, all codes, the trap, raw globals x 2, two refusals, 2^31 elements x 4, 17 recorded
# layers and the benchmark.
CASES = {"check_interpreted.py": 70, "check_compiled.py": 29}


@pytest.fixture(scope="session")
def python() -> str:
    if given := os.environ.get("SM70_TRITON_PYTHON"):
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sm70-convert" / "triton-3.6.0"
    made = cache / "bin" / "python"
    if not (cache / "complete").exists():
        if not (os.environ.get("SM70_DOWNLOAD") or os.environ.get("CI")):
            pytest.skip("triton 3.6.0 is not here: set SM70_TRITON_PYTHON, or SM70_DOWNLOAD=1 to fetch it")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(cache)], check=True)
        subprocess.run([str(made), "-m", "pip", "install", "--quiet", *NEEDS], check=True)
        (cache / "complete").touch()
    return str(made)


@pytest.mark.parametrize("file", CASES)
def test_on_a_cpu(python: str, file: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(str(TESTS.parent / root) for root in ("convert", "kernels"))}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    if file == "check_interpreted.py":
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "gpu_kernels" / file)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert run.stdout.rstrip().rsplit("\n", 1)[-1].startswith(f"{CASES[file]} passed"), run.stdout[-300:]
