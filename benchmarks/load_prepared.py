"""One rank's banks into parameters, against reading the same files into freshly allocated memory.

    python benchmarks/load_prepared.py --check

A pair is one load (allocate every parameter, then PreparedFolder.fill), then one plain read of the same files
(allocate as many bytes as each has, then readinto). Before each, the files' pages are dropped from the page
cache (fsync, then posix_fadvise DONTNEED): as cold as a user can make it, though a disk may have a cache of
its own. The order of the two alternates. Ratio = read seconds / load seconds, the median over the pairs.
GB = 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sm70_convert.vllm_plugin.folder import PreparedFolder
from synthetic import Synthetic, write_checkpoint

MIN_RATIO = 0.9
SPEC = Synthetic("awq", layers=6, experts=128, hidden=2048, intermediate=768, group_size=64)  # 2.05 GB of banks


def prepare(root: Path) -> Path:
    """A prepared folder of the synthetic checkpoint, whose own files go away."""
    write_checkpoint(root / "source", SPEC)
    command = [sys.executable, "-m", "sm70_convert.cli", str(root / "source"), "--out", str(root / "prepared"), "-q"]
    subprocess.run(command, check=True)
    for path in (root / "source").iterdir():
        path.unlink()
    return root / "prepared"


def drop(files: list[Path]) -> None:
    """Drops the pages of files from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load(folder: Path) -> int:
    """Every bank of rank 0 into parameters."""
    prepared = PreparedFolder.open(folder)
    assert prepared is not None
    layers = {layer: prepared.empty_parameters(layer, 0, 1) for layer in prepared.moe.layers}
    return sum(prepared.fill(parameters, layer, 0, 1) for layer, parameters in layers.items())


def read(files: list[Path]) -> int:
    """The same files into fresh memory."""
    kept = []
    for path in files:
        with path.open("rb", buffering=0) as file:
            memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
            view, done = memoryview(memory.numpy()), 0
            while count := file.readinto(view[done:]):
                done += count
            assert done == len(view)
            kept.append(memory)
    return sum(len(memory) for memory in kept)


def timed(run: Callable[[], int], files: list[Path]) -> tuple[float, int]:
    drop(files)
    start = time.perf_counter()
    count = run()
    return time.perf_counter() - start, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="a prepared folder with banks for TP 1; made by default")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if the ratio is below {MIN_RATIO}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or prepare(Path(scratch))
        files = sorted((folder / "sm70/tp1/rank0").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        rows = []
        for pair in range(options.pairs):
            arms = {"load": lambda: load(folder), "read": lambda: read(files)}
            seconds = {}
            for arm in list(arms)[:: 1 if pair % 2 == 0 else -1]:
                seconds[arm], count = timed(arms[arm], files)
                assert size - 4096 * len(files) < count <= size  # headers are read, but not into parameters
            rows.append((seconds["load"], seconds["read"]))
    ratio = statistics.median(b / a for a, b in rows)
    result = {
        "bytes": size,
        "pairs": [{"load_seconds": round(a, 3), "read_seconds": round(b, 3)} for a, b in rows],
        "load_gb_per_second": round(size / 1e9 / statistics.median(a for a, _ in rows), 2),
        "read_gb_per_second": round(size / 1e9 / statistics.median(b for _, b in rows), 2),
        "ratio": round(ratio, 3),
    }
    if options.json:
        print(json.dumps(result))
    else:
        for row in result["pairs"]:  # type: ignore[attr-defined]
            print(f"load {row['load_seconds']:.3f} s   read {row['read_seconds']:.3f} s")
        print(
            f"{size / 1e9:.2f} GB: load {result['load_gb_per_second']} GB/s, read {result['read_gb_per_second']} GB/s"
        )
        print(f"ratio {ratio:.3f} (target {MIN_RATIO} or more)")
    if options.check and ratio < MIN_RATIO:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
