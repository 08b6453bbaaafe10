"""Where the V100 runtimes' own Python lies. They import as `vllm` too, so they run in a process of their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEEL = ("revolta==0.1.4", "--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64")


def unavailable(reason: str) -> Any:
    """Skips, and fails in CI, where everything must be there."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def revolta_tree() -> Path:
    """The unpacked wheel at $SM70_REVOLTA, else one fetched into the cache folder if $SM70_DOWNLOAD or $CI is set."""
    if given := os.environ.get("SM70_REVOLTA"):
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sm70-convert" / "revolta-0.1.4"
    if not (cache / "vllm").is_dir():
        if not (os.environ.get("SM70_DOWNLOAD") or os.environ.get("CI")):
            unavailable(
                "ReVolta is not here: set SM70_REVOLTA to its unpacked wheel, or SM70_DOWNLOAD=1 to fetch 79 MB"
            )
        _fetch(cache)
    return cache


def onecat_tree() -> Path:
    """The 1Cat-vLLM source tree at $SM70_1CAT. Optional in CI too: it has no wheel on a package index."""
    given = os.environ.get("SM70_1CAT")
    if not given:
        pytest.skip("set SM70_1CAT to a 1Cat-vLLM source tree")
    return Path(given)


def _fetch(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *WHEEL,
        "--no-deps",
        "--only-binary=:all:",
        "-q",
        "-d",
        str(cache),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        unavailable(f"ReVolta's wheel cannot be fetched: {done.stderr.strip()[-300:]}")
    for wheel in cache.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                cache, [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
            )
        wheel.unlink()


@functools.cache
def run_contract(tree: Path, work: Path, *cases: str, script: str = "sm70_contract.py") -> dict[str, Any]:
    """Runs cases of a contract script over one tree; gives its report, case by case."""
    python = os.environ.get("SM70_RUNTIME_PYTHON", sys.executable)
    path = [
        str(tree),
        str(HERE),
        str(ROOT / "tests"),
        str(ROOT / "benchmarks"),
        str(ROOT / "convert"),
        str(ROOT / "kernels"),
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env |= {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [python, str(HERE / script), str(work), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    report = work / "report.json"
    if not report.exists():
        if done.returncode == NO_RUNTIME:
            unavailable(f"{python} cannot import the runtime's Python: {done.stdout.strip()[-300:]}")
        raise AssertionError(f"no report; exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(report.read_text())
    return result


NO_RUNTIME = 77
