"""What digests cost a conversion: with BLAKE3, with SHA-256, and with none.

    python benchmarks/hashing.py

Five rounds of three conversions of one synthetic AWQ checkpoint (TP 4, two workers, cold source), in turn; medians. "none"
is no option of the tool: this script runs it with a digest that takes no bytes. Beside them, how many GB a CPU second
each hash takes in, in the pieces of 256 kB that a conversion gives it. GB = 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from convert_vs_cp import SIZES, Bench

NONE = (
    "import sys; from sm70_convert import bank; from sm70_convert.cli import main\n"
    "class Nothing:\n"
    "    update = lambda self, data: None\n"
    "    digest = lambda self: bytes(32)\n"
    "    hexdigest = lambda self: '0' * 64\n"
    "bank.HASHES['blake3'] = Nothing\n"
    "main(sys.argv[1:])"
)
RUN = "{model} --out {out} --tp-size 4 --jobs 2 -q"


def rate(name: str) -> float:
    """GB per CPU second of one thread."""
    from sm70_convert.bank import HASHES

    data, digest, done = bytes(256 << 10), HASHES[name](), 0
    start = time.process_time()
    while (spent := time.process_time() - start) < 0.5:
        digest.update(data)
        done += len(data)
    return done / spent / 1e9


def measure(layers: int, rounds: int, work: Path, sizes: dict[str, int]) -> list[dict[str, Any]]:
    bench = Bench(argparse.Namespace(format="awq", tp_sizes=[4], jobs=2, **sizes), work)
    bench.make_model(layers)
    commands = {
        "none": ["{python}", "-c", NONE, *RUN.split()],
        "blake3": ["{tool}", *RUN.split()],
        "sha256": ["{tool}", *RUN.split(), "--hash", "sha256"],
    }
    runs: dict[str, list[Any]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(bench.convert(command, layers))
    rows = []
    for name, of in runs.items():
        seconds, cpu = (statistics.median(getattr(run, field) for run in of) for field in ("seconds", "cpu_seconds"))
        none = [statistics.median(getattr(run, field) for run in runs["none"]) for field in ("seconds", "cpu_seconds")]
        rows.append(
            {
                "hash": name,
                "seconds": round(seconds, 3),
                "cpu_seconds": round(cpu, 3),
                "wall_over_none": round(seconds / none[0], 3),
                "cpu_over_none": round(cpu / none[1], 3),
                "gb_per_cpu_second": None if name == "none" else round(rate(name), 2),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"layers": 8, "rounds": 5} | SIZES
    for name, default in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"default {default}"
        )
    parser.add_argument("--work", type=Path, help="put the work folder, removed at the end, in here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hashing-", dir=options.work or Path.cwd()) as work:
        rows = measure(options.layers, options.rounds, Path(work), {name: getattr(options, name) for name in SIZES})
    print(f"{'hash':7} {'seconds':>8} {'/ none':>7} {'CPU s':>7} {'/ none':>7} {'GB/CPU s':>9}")
    for row in rows:
        print(
            f"{row['hash']:7} {row['seconds']:8.2f} {row['wall_over_none']:7.2f} {row['cpu_seconds']:7.2f} "
            f"{row['cpu_over_none']:7.2f} {row['gb_per_cpu_second'] or '':>9}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
