"""Conversion against `cp` of the same bytes, on a synthetic checkpoint.

    python benchmarks/convert_vs_cp.py --format awq --check
    python benchmarks/convert_vs_cp.py --format nvfp4 --tp-size 1 --tp-size 2 --tp-size 4 --check

A pair is one conversion, then `cp -r --reflink=never` of the folder it wrote and an fsync of every copied
file; the conversion's own fsyncs are in its time. Ratio = cp seconds / convert seconds: both write the same
number of bytes. Before each run its output is removed and its source's pages are dropped from the page cache
(fsync, then posix_fadvise DONTNEED on every file): as cold as a user can make it, though a disk may have a
cache of its own. CPU seconds and peak RSS are the child's, from wait4. A child's peak RSS is never below its
parent's, so nothing but the standard library is imported here and another child makes the checkpoint.
MB = 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMAND = "{tool} {model} --out {out} {tp_sizes} --jobs {jobs} -q"
NAIVE = f"{{python}} {shlex.quote(str(HERE / 'naive.py'))} {{model}} {{out}} "
NAIVE += "{tp_sizes} --layers {layers}"
SIZES = {"experts": 128, "hidden": 2048, "intermediate": 768, "group_size": 64, "shards": 4}
# By format; several TP sizes in one pass may take 1.15 x the time of cp.
MIN_RATIO = {"awq": 1.15, "nvfp4": 1.0, "w4a16_nvfp4": 1.0}
MIN_RATIO_SEVERAL, MIN_NAIVE_RATIO, MAX_RSS_MB = 1 / 1.15, 8.0, 120.0


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_seconds: float
    peak_rss_mb: float


def measure(command: list[str]) -> Run:
    """Runs one command to its end."""
    start = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"exit code {child.returncode} from: {shlex.join(command)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def sync(folder: Path, *, drop: bool) -> None:
    """Fsyncs every file, and drops its pages from the page cache if so told."""
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Bench:
    """One checkpoint at a time in a work folder, and the runs over it."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.model, self.out, self.copy = work / "model", work / "out", work / "copy"

    def make_model(self, layers: int) -> None:
        shutil.rmtree(self.model, ignore_errors=True)
        sizes = {"layers": layers} | {name: getattr(self.options, name) for name in ("format", *SIZES)}
        command = [sys.executable, str(HERE / "synthetic.py"), str(self.model)]
        command += [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
        measure(command)

    def convert(self, words: list[str], layers: int) -> Run:
        """Runs a command whose words may hold {tool}, {model} and so on; {tp_sizes} stands for all those options."""
        values = {"tool": Path(sys.executable).with_name("sm70-convert"), "python": sys.executable}
        values |= {"model": self.model, "out": self.out, "jobs": self.options.jobs, "layers": layers}
        sizes = [word for size in self.options.tp_sizes for word in ("--tp-size", str(size))]
        command: list[str] = []
        for word in words:
            command += sizes if word == "{tp_sizes}" else [word.format(**values)]
        shutil.rmtree(self.out, ignore_errors=True)
        sync(self.model, drop=True)
        return measure(command)

    def cp(self) -> float:
        shutil.rmtree(self.copy, ignore_errors=True)
        sync(self.out, drop=True)
        start = time.perf_counter()
        measure(["cp", "-r", "--reflink=never", str(self.out), str(self.copy)])
        sync(self.copy, drop=False)
        seconds = time.perf_counter() - start
        shutil.rmtree(self.copy)
        return seconds

    def naive(self, layers: int) -> float:
        run = self.convert(shlex.split(NAIVE), layers)
        start = time.perf_counter()
        sync(self.out, drop=False)
        return run.seconds + time.perf_counter() - start


def run(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures; whatever is not asked for is left out."""
    bench, layers, command = Bench(options, work), options.layers, shlex.split(options.command)
    bench.make_model(layers)
    source_bytes = folder_bytes(bench.model)
    runs, copies = [], []
    for _ in range(options.pairs):
        runs.append(bench.convert(command, layers))
        copies.append(bench.cp())
    cp_seconds = statistics.median(copies)
    rss = statistics.median(run.peak_rss_mb for run in runs)
    figures: dict[str, Any] = {
        "format": options.format,
        "tp_sizes": options.tp_sizes,
        "layers": layers,
        "source_bytes": source_bytes,
        "output_bytes": folder_bytes(bench.out),
        "convert_seconds": statistics.median(run.seconds for run in runs),
        "cp_seconds": cp_seconds,
        "ratio": statistics.median(copy / run.seconds for copy, run in zip(copies, runs, strict=True)),
        "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
        "peak_rss_mb": max(run.peak_rss_mb for run in runs),
        "pairs": [{**asdict(run), "cp_seconds": copy} for run, copy in zip(runs, copies, strict=True)],
    }
    if options.naive_layers:
        naive = bench.naive(options.naive_layers) / options.naive_layers
        ours = figures["convert_seconds"] / layers
        figures |= {
            "naive_seconds_per_layer": naive,
            "naive_cp_ratio": cp_seconds / layers / naive,
            "naive_ratio": naive / ours,
        }
    if options.layers_growth:
        bench.make_model(options.layers_growth)
        grown = bench.convert(command, options.layers_growth).peak_rss_mb
        figures |= {"growth_layers": options.layers_growth, "growth_peak_rss_mb": grown}
        figures["growth_percent"] = 100 * (grown / rss - 1)
    return figures


def failures(figures: dict[str, Any]) -> list[str]:
    """What a check finds wrong, one line a figure; a figure that was not measured passes."""
    ratio = MIN_RATIO_SEVERAL if len(figures["tp_sizes"]) > 1 else MIN_RATIO[figures["format"]]
    rss = figures.get("growth_peak_rss_mb", figures["peak_rss_mb"])
    naive = figures.get("naive_ratio", MIN_NAIVE_RATIO) if figures["format"] == "awq" else MIN_NAIVE_RATIO
    checks = [
        ("ratio", figures["ratio"], figures["ratio"] < ratio, f"at least {ratio:.3f}"),
        ("peak_rss_mb", rss, rss >= MAX_RSS_MB, f"less than {MAX_RSS_MB}"),
        ("naive_ratio", naive, naive < MIN_NAIVE_RATIO, f"at least {MIN_NAIVE_RATIO}"),
    ]
    return [f"FAILED {name}: {value:.3f}, {limit} wanted" for name, value, bad, limit in checks if bad]


def table(figures: dict[str, Any]) -> str:
    rows = {name: value for name, value in figures.items() if name != "pairs"}
    shown = ((name, f"{value:.3f}" if isinstance(value, float) else str(value)) for name, value in rows.items())
    return "\n".join(f"{name:24}{value:>14}" for name, value in shown)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Conversion time against cp and fsync of the same bytes.")
    parser.add_argument("--format", choices=("awq", "nvfp4", "w4a16_nvfp4"), default="awq")
    parser.add_argument("--tp-size", type=int, action="append", dest="tp_sizes", metavar="N", help="repeat; default 4")
    numbers = {"pairs": 5, "layers": 8, "layers_growth": 16, "naive_layers": 2, "jobs": 2}
    for name, default in (numbers | SIZES).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--work", type=Path, help="put the work folder, removed at the end, in here")
    parser.add_argument("--command", default=COMMAND, help=f"default: {COMMAND}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, each pair's too")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure is worse than wanted")
    options = parser.parse_args(arguments)
    options.tp_sizes = options.tp_sizes or [4]
    with tempfile.TemporaryDirectory(prefix="convert_vs_cp-", dir=options.work or Path.cwd()) as work:
        figures = run(options, Path(work))
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    failed = failures(figures) if options.check else []
    print(*failed, sep="\n", end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
