"""Speed of the CPU kernels: GB of source per CPU second, and as a ratio to memcpy, medians of 5.

A: hidden 2048, intermediate 768; B: hidden 2560, intermediate 160. Data from a few experts in turn, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_kernels.numpy_sm70 import NumpyKernel
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
SHAPES = {"A": (2048, 768, (1, 4)), "B": (2560, 160, (1,))}
KINDS = {  # name: group and layouts
    "awq-g64": (64, ("awq-half2", "awq-compact", "awq-int4zero")),
    "awq-g128": (128, ("awq-half2", "awq-compact", "awq-int4zero")),
    "nvfp4": (16, ("nvfp4-fp16", "nvfp4-raw")),
}
EXPERTS = 4


def experts(rng: np.random.Generator, hidden: int, intermediate: int, group: int) -> list[list[Projection]]:
    """Random experts with scales as they occur."""
    sides = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))

    def projection(k: int, n: int) -> Projection:
        if group == 16:
            weight = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
            return Projection(weight, rng.integers(16, 127, (n, k // 16), dtype=np.uint8), None, np.float32(0.01))
        weight, zeros = (rng.integers(0, 2**32, (r, n // 8), dtype=np.uint32) for r in (k, k // group))
        scales = rng.lognormal(-5, 0.5, (k // group, n)).astype(np.float16).view(np.uint16)
        return Projection(weight, scales, zeros, None)

    return [[projection(*side) for side in sides] for _ in range(EXPERTS)]


def banks(layout: str, hidden: int, intermediate: int, group: int, ranks: int) -> dict[str, Array]:
    """Zeroed bank tensors of one expert, touched."""
    out: dict[str, Array] = {}
    for name, k, n in (("w13", hidden, 2 * intermediate // ranks), ("w2", intermediate // ranks, hidden)):
        out[f"{name}_tm_weight"] = np.ones((ranks, k, n // 8), np.uint32)
        shape = (ranks, k // group, n)
        if layout == "nvfp4-raw":
            out[f"{name}_raw_scale_codes"] = np.ones(shape, np.uint8)
            out[f"{name}_raw_global_scales"] = np.ones((ranks, 2 if name == "w13" else 1), np.float32)
            continue
        out[f"{name}_tm_scales"] = {
            "awq-half2": lambda: np.ones(shape, np.uint32),  # noqa: B023
            "awq-compact": lambda: np.ones((*shape, 3), np.uint8),  # noqa: B023
            "awq-int4zero": lambda: np.ones((*shape[:2], n // 2, 5), np.uint8),  # noqa: B023
            "nvfp4-fp16": lambda: np.ones(shape, np.uint16),  # noqa: B023
        }[layout]()
    return out


def cpu_seconds(function: Callable[[], object], least: float = 0.1) -> float:
    """Of one call: the median of 5 runs, each of `least` seconds or more."""
    function()
    samples = []
    for _ in range(5):
        calls, start = 0, time.process_time()
        while (spent := time.process_time() - start) < least:
            function()
            calls += 1
        samples.append(spent / calls)
    return statistics.median(samples)


def measure() -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(0), []
    source, target = np.ones(1 << 25, np.uint8), np.ones(1 << 25, np.uint8)
    memcpy = source.nbytes / cpu_seconds(lambda: np.copyto(target, source)) / 1e9
    rows.append({"kind": "memcpy", "gb_per_cpu_second": memcpy})
    for kind, (group, layouts) in KINDS.items():
        for shape, (hidden, intermediate, sizes) in SHAPES.items():
            if intermediate % group:  # as converted: B has groups of 32
                group = 32  # noqa: PLW2901
            layer = experts(rng, hidden, intermediate, group)
            nbytes = sum(x.nbytes for p in layer[0] for x in p[:3] if x is not None)
            for layout in layouts:
                for interleave in (False, True):
                    for ranks in sizes:
                        if intermediate // ranks % group:
                            continue
                        kernel, outs = NumpyKernel(), [banks(layout, hidden, intermediate, group, ranks)]

                        def run(kernel=kernel, outs=outs, layer=layer, layout=layout, interleave=interleave):  # type: ignore[no-untyped-def]
                            for parts in layer:
                                kernel.prepare(*parts, layout=layout, interleave=interleave, outs=outs)

                        speed = EXPERTS * nbytes / cpu_seconds(run) / 1e9
                        rows.append(
                            {
                                "kind": kind,
                                "shape": shape,
                                "group_size": group,
                                "layout": layout,
                                "interleave": interleave,
                                "tp_size": ranks,
                                "gb_per_cpu_second": speed,
                                "of_memcpy": speed / memcpy,
                            }
                        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    rows = measure() if (args := parser.parse_args()) else []
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"memcpy: {rows[0]['gb_per_cpu_second']:.1f} GB/s")
    print(f"{'kind':9} {'shape':5} {'g':>3} {'layout':13} {'interleave':10} {'tp':>2} {'GB/s':>6} {'of memcpy':>9}")
    for row in rows[1:]:
        print(
            f"{row['kind']:9} {row['shape']:5} {row['group_size']:3} {row['layout']:13} "
            f"{'on' if row['interleave'] else 'off':10} {row['tp_size']:2} {row['gb_per_cpu_second']:6.2f} "
            f"{row['of_memcpy']:9.3f}"
        )


if __name__ == "__main__":
    main()
