"""One rank's banks into parameters, against reading the same files into freshly allocated memory.

    python benchmarks/load_prepared.py --check

A pair is one load (allocate every parameter, then PreparedFolder.fill), then one plain read of the same files
(allocate as many bytes as each has, then readinto). Before each, the files' pages are dropped from the page
cache (fsync, then posix_fadvise DONTNEED): as cold as a user can make it, though a disk may have a cache of
its own. Each runs in a process of its own, so that neither finds memory that the other left; the order alternates,
and one pair before the first is not counted. Ratio = read seconds / load seconds of the medians. GB = 10^9 bytes.
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
from pathlib import Path

import torch

from sm70_convert.vllm_plugin.folder import PreparedFolder
from synthetic import Synthetic, write_checkpoint

MIN_RATIO = 0.9
ARMS = ("load", "read")
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


def run(arm: str, folder: Path) -> float:
    """The seconds of one arm, in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(folder), "--arm", arm]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def one(arm: str, folder: Path) -> float:
    """The same in this process."""
    files = bank_files(folder)
    size = sum(path.stat().st_size for path in files)
    drop(files)
    start = time.perf_counter()
    count = load(folder) if arm == "load" else read(files)
    seconds = time.perf_counter() - start
    assert size - 4096 * len(files) < count <= size  # headers are read, but not into parameters
    return seconds


def bank_files(folder: Path) -> list[Path]:
    return sorted((folder / "sm70/tp1/rank0").glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading prepared banks against plain reads.")
    parser.add_argument("--folder", type=Path, help="a prepared folder with banks for TP 1; made by default")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if the ratio is below {MIN_RATIO}")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(one(options.arm, options.folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or prepare(Path(scratch))
        size = sum(path.stat().st_size for path in bank_files(folder))
        rows = []
        for pair in range(-1, options.pairs):
            row = {arm: run(arm, folder) for arm in ARMS[:: 1 if pair % 2 == 0 else -1]}
            if pair >= 0:
                rows.append(row)
                print(f"load {row['load']:.3f} s   read {row['read']:.3f} s", flush=True)
    middle = {arm: statistics.median(row[arm] for row in rows) for arm in ARMS}
    speed = {arm: round(size / 1e9 / seconds, 2) for arm, seconds in middle.items()}
    ratio = middle["read"] / middle["load"]
    print(f"{size / 1e9:.2f} GB: load {speed['load']} GB/s, read {speed['read']} GB/s")
    print(f"ratio {ratio:.3f} (target {MIN_RATIO} or more)")
    if options.json:
        document = {"bytes": size, "pairs": rows, "gb_per_second": speed, "ratio": round(ratio, 3)}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.check and ratio < MIN_RATIO:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
