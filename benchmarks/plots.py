"""The tables and plots of docs/performance.md, from the figures that the benchmarks wrote.

    python benchmarks/plots.py docs/performance

Reads kernels.json, awq.json, nvfp4.json, several.json, hashing.json, verify.json, load.json and stages.json there, writes the
plots beside them, and fills in what stands between the markers of performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

STYLE = {"svg.hashsalt": "sm70-convert", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {"naive": "#999999", "numpy": "#4c78a8", "cpp, plain": "#f2a65a", "cpp": "#d1495b"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def kernels(rows: list[dict[str, Any]], folder: Path) -> str:
    def case(row: dict[str, Any]) -> str:
        form = f"{row['layout']}{', interleaved' if row['interleave'] else ''}"
        return f"{row['shape']}, group {row['group_size']}, TP {row['tp_size']}, {form}"

    slow = {(r["shape"], r["group_size"]): r for r in rows if r["kernel"] == "naive"}
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["kernel"] != "naive":
            by_case.setdefault(case(row), {})[row["kernel"]] = row
            by_case[case(row)].setdefault("naive", slow[row["shape"], row["group_size"]])
    shown = [name for name in by_case if "half2" in name or "fp16" in name]
    figure, axes = plt.subplots(figsize=(7.5, 0.55 * len(shown) + 1))
    height = 0.8 / len(COLOURS)
    for i, (kernel, colour) in enumerate(COLOURS.items()):
        values = [by_case[name][kernel]["of_memcpy"] if kernel in by_case[name] else 0 for name in shown]
        axes.barh([n + i * height for n in range(len(shown))], values, height, color=colour, label=kernel)
    axes.set_yticks([n + 0.3 for n in range(len(shown))], shown)
    axes.invert_yaxis()
    axes.set_xlabel("GB of source per CPU second, over memcpy's in the same pair")
    axes.legend(frameon=False, loc="lower right")
    save(figure, folder / "kernels.svg")
    head = ["case", *(f"{name}, of memcpy" for name in COLOURS), "cpp, GB/s", "cpp over naive"]
    lines = []
    for name, of in by_case.items():
        cells = [f"{of[kernel]['of_memcpy']:.3f}" if kernel in of else "" for kernel in COLOURS]
        fast = of.get("cpp", of.get("cpp, plain", of.get("numpy")))
        assert fast is not None
        lines.append([name, *cells, f"{fast['gb_per_cpu_second']:.1f}", f"{fast['of_naive']:.0f}"])
    return table(head, lines)


def end_to_end(runs: dict[str, dict[str, Any]], folder: Path) -> str:
    figure, axes = plt.subplots(figsize=(7.5, 0.5 * len(runs) + 1.2))
    for i, figures in enumerate(runs.values()):
        ratios = [pair["cp_seconds"] / pair["seconds"] for pair in figures["pairs"]]
        axes.barh(i, figures["ratio"], 0.6, color=COLOURS["cpp"])
        axes.plot(ratios, [i] * len(ratios), "k|", markersize=9)
    axes.axvline(1, color="k", linewidth=0.8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set_xlabel("time of cp + fsync of the same bytes over the conversion's (bars: medians; ticks: pairs)")
    save(figure, folder / "end_to_end.svg")
    head = [
        "run",
        "source GB",
        "output GB",
        "seconds",
        "cp + fsync",
        "ratio",
        "CPU s",
        "peak RSS MB",
        "at 16 layers",
        "naive way",
    ]
    lines = []
    for name, f in runs.items():
        grown, slow = f.get("growth_peak_rss_mb"), f.get("naive_ratio")
        lines.append(
            [
                name,
                f"{f['source_bytes'] / 1e9:.2f}",
                f"{f['output_bytes'] / 1e9:.2f}",
                f"{f['convert_seconds']:.2f}",
                f"{f['cp_seconds']:.2f}",
                f"**{f['ratio']:.2f}**",
                f"{f['cpu_seconds']:.2f}",
                f"{f['peak_rss_mb']:.0f}",
                f"{grown:.0f} ({f['growth_percent']:+.0f} %)" if grown else "",
                f"{slow:.1f} x slower" if slow else "",
            ]
        )
    return table(head, lines)


def hashing(rows: list[dict[str, Any]]) -> str:
    head = ["digest", "seconds", "over none", "CPU s", "over none", "GB per CPU s"]
    return table(
        head,
        [
            [
                row["hash"],
                f"{row['seconds']:.2f}",
                f"{row['wall_over_none']:.2f}",
                f"{row['cpu_seconds']:.2f}",
                f"{row['cpu_over_none']:.2f}",
                f"{row['gb_per_cpu_second'] or ''}",
            ]
            for row in rows
        ],
    )


def stages(rows: list[dict[str, Any]], folder: Path) -> str:
    names = list(rows[0]["milliseconds"])
    figure, axes = plt.subplots(figsize=(7.5, 0.45 * len(rows) + 1.2))
    left = [0.0] * len(rows)
    for name in names:
        values = [row["milliseconds"][name] for row in rows]
        axes.barh(range(len(rows)), values, 0.6, left=left, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows)), [row["run"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("CPU milliseconds an expert, one thread")
    axes.legend(frameon=False, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.3))
    save(figure, folder / "stages.svg")
    head = ["run", "expert MB", *names, "total ms"]
    return table(
        head,
        [
            [
                row["run"],
                f"{row['expert_mb']:.2f}",
                *(f"{row['milliseconds'][n]:.2f}" for n in names),
                f"{sum(row['milliseconds'].values()):.2f}",
            ]
            for row in rows
        ],
    )


def machine() -> str:
    found = re.search(
        r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"), re.MULTILINE
    )
    return f"{found[1] if found else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Linux, shared"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    mpl.rcParams.update(STYLE)
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    runs = {"AWQ, TP 4": read["awq"], "NVFP4, TP 4": read["nvfp4"], "AWQ, TP 1, 2 and 4": read["several"]}
    verify, load = read["verify"], read["load"]
    parts = {
        "machine": machine(),
        "kernels": kernels(read["kernels"], folder),
        "end to end": end_to_end(runs, folder),
        "hashing": hashing(read["hashing"]),
        "stages": stages(read["stages"], folder),
        "verify": f"{verify['bytes'] / 1e9:.2f} GB: verify {verify['verify_seconds']:.2f} s, "
        f"read {verify['read_seconds']:.2f} s, ratio **{verify['ratio']:.2f}**",
        "load": f"{load['bytes'] / 1e9:.2f} GB: ratio **{load['ratio']:.2f}**",
    }
    page = folder.with_suffix(".md")
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda m, part=part: m[1] + part + "\n" + m[2], text)  # type: ignore[misc]
        assert count == 1, name
        print(f"{name}\n\n{part}\n")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
