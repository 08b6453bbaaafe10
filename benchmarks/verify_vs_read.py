"""`sm70-convert verify` (every digest) against reading the same files.

    python benchmarks/verify_vs_read.py --check

A pair is one verify and one plain read of every file of the folder (a Python process of as many threads, each reading whole
files into a buffer of 4 MB), the order alternating. Before each, the files' pages are dropped from the page cache: as cold
as a user can make it, though a disk may have a cache of its own. Ratio = read seconds / verify seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from convert_vs_cp import COMMAND, SIZES, Bench, files, folder_bytes, measure, sync

MIN_RATIO = 0.9
CHUNK = 4 << 20


def read(path: Path) -> int:
    """Reads a whole file; returns its size."""
    buffer, done = memoryview(bytearray(CHUNK)), 0
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            done += count
    return done


def run(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    bench = Bench(options, work)
    bench.make_model(options.layers)
    bench.convert(COMMAND.split(), options.layers)
    commands = {
        "verify": [str(Path(sys.executable).with_name("sm70-convert")), "verify", str(bench.out), "-q", "--jobs"],
        "read": [sys.executable, __file__, "--read", str(bench.out), "--jobs"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for pair in range(options.pairs):
        for name in (list(commands), list(reversed(commands)))[pair % 2]:
            sync(bench.out, drop=True)
            seconds[name].append(measure([*commands[name], str(options.jobs)]).seconds)
    return {
        "bytes": folder_bytes(bench.out),
        "verify_seconds": statistics.median(seconds["verify"]),
        "read_seconds": statistics.median(seconds["read"]),
        "ratio": statistics.median(r / v for r, v in zip(seconds["read"], seconds["verify"], strict=True)),
        "pairs": [{"verify": v, "read": r} for v, r in zip(seconds["verify"], seconds["read"], strict=True)],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("awq", "nvfp4"), default="awq")
    numbers = {"pairs": 5, "layers": 16, "jobs": 2} | SIZES
    for name, default in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"default {default}"
        )
    parser.add_argument("--work", type=Path, help="put the work folder, removed at the end, in here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--check", action="store_true", help="exit 1 if the ratio is worse than wanted")
    parser.add_argument("--read", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.tp_sizes = [4]
    if options.read:
        with ThreadPoolExecutor(options.jobs) as pool:
            return 0 if sum(pool.map(read, files(options.read))) else 1
    with tempfile.TemporaryDirectory(prefix="verify_vs_read-", dir=options.work or Path.cwd()) as work:
        figures = run(options, Path(work))
    print(
        f"{figures['bytes'] / 1e9:.2f} GB: verify {figures['verify_seconds']:.2f} s, read {figures['read_seconds']:.2f} s, "
        f"ratio {figures['ratio']:.3f} ({MIN_RATIO} or more wanted)"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.check and figures["ratio"] < MIN_RATIO:
        print(f"FAILED ratio: {figures['ratio']:.3f}, at least {MIN_RATIO} wanted")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
