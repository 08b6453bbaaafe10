"""The Triton kernels on a CUDA device: every layout against the reference, then their speed against the device's own copy.

    python benchmarks/gpu_kernels.py

Ends within five minutes. Times are medians of CUDA events over whole layers (shape A: 128 experts, hidden 2048, intermediate
768; Qwen3.8: 512 experts, hidden 2560, intermediate 640, TP 4). A copy moves as many bytes, counted both ways, with
torch's copy_. Exit code 1 if a bank differs, 2 if there is no CUDA device. GB = 10^9 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sm70_kernels import reference
from sm70_kernels.spec import LayerProjection, Projection

if TYPE_CHECKING:
    from collections.abc import Callable

AWQ, NVFP4 = ("awq-half2", "awq-compact", "awq-int4zero"), ("nvfp4-fp16", "nvfp4-raw")
# name, experts, hidden, intermediate, AWQ group, TP size
TIMED = [("A", 128, 2048, 768, 128, 1), ("Qwen3.8", 512, 2560, 640, 32, 4)]
ROUNDS = 7


def expert(rng: np.random.Generator, layout: str, hidden: int, intermediate: int, group: int) -> list[Projection]:
    """Random words, with scales that every layout can hold."""

    def projection(k: int, n: int, factor: float) -> Projection:
        if layout in NVFP4:
            codes = rng.integers(24, 112, (n, k // 16), dtype=np.uint8)
            return Projection(rng.integers(0, 256, (n, k // 2), dtype=np.uint8), codes, None, np.float32(factor))
        weight, zeros = (rng.integers(0, 2**32, (rows, n // 8), dtype=np.uint32) for rows in (k, k // group))
        scales = rng.lognormal(-5, 1, (k // group, n)).astype(np.float16).view(np.uint16)
        return Projection(weight, scales, zeros, None)

    return [
        projection(hidden, intermediate, 2**-7),
        projection(hidden, intermediate, 2**-7),
        projection(intermediate, hidden, 2**-5),
    ]


def stack(projections: list[Projection], device: torch.device) -> LayerProjection:
    def tensor(name: str) -> torch.Tensor:
        array = np.stack([getattr(p, name) for p in projections])
        return torch.from_numpy(array.view({4: np.int32, 2: np.int16, 1: np.uint8}[array.itemsize])).to(device)

    if projections[0].zeros is None:
        factors = torch.tensor([float(p.global_scale or 0) for p in projections], device=device)
        return LayerProjection(tensor("weight"), tensor("scales"), None, factors)
    return LayerProjection(tensor("weight"), tensor("scales").view(torch.float16), tensor("zeros"), None)


def banks(
    layout: str, experts: int, hidden: int, intermediate: int, group: int, ranks: int, device: torch.device
) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    group = 16 if layout in NVFP4 else group
    for name, k, n in (("w13", hidden, 2 * intermediate // ranks), ("w2", intermediate // ranks, hidden)):

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((ranks, experts, *shape), dtype=dtype, device=device)

        out[f"{name}_tm_weight"] = empty(k, n // 8, dtype=torch.int32)
        if layout == "nvfp4-raw":
            out[f"{name}_raw_scale_codes"] = empty(k // group, n, dtype=torch.uint8)
            out[f"{name}_raw_global_scales"] = empty(2 if name == "w13" else 1, dtype=torch.float32)
            continue
        shape, dtype = {
            "awq-half2": ((n,), torch.int32),
            "awq-compact": ((n, 3), torch.uint8),
            "awq-int4zero": ((n // 2, 5), torch.uint8),
            "nvfp4-fp16": ((n,), torch.float16),
        }[layout]
        out[f"{name}_tm_scales"] = empty(k // group, *shape, dtype=dtype)
    return out


def check(device: torch.device) -> tuple[int, list[str]]:
    """(tensors compared, what differs), over all layouts, interleaved or not, several TP sizes."""
    from sm70_kernels.triton_sm70 import prepare_layer

    compared, wrong = 0, []
    rng = np.random.default_rng(0)
    for layout, interleave, (hidden, intermediate) in itertools.product(
        (*AWQ, *NVFP4), (False, True), ((64, 128), (96, 192))
    ):
        experts = [expert(rng, layout, hidden, intermediate, 32) for _ in range(2)]
        outs = [banks(layout, 2, hidden, intermediate, 32, ranks, device) for ranks in (1, 2)]
        layer = [stack([parts[i] for parts in experts], device) for i in range(3)]
        prepare_layer(*layer, layout=layout, interleave=interleave, outs=outs)
        for ranks, out in zip((1, 2), outs, strict=True):
            for rank, number in itertools.product(range(ranks), range(2)):
                wanted = reference.prepare_rank(
                    *experts[number], layout=layout, interleave=interleave, rank=rank, tp_size=ranks
                )
                for name, tensor in wanted.items():
                    got = out[name][rank, number].cpu().contiguous()
                    compared += 1
                    if not torch.equal(got.view(torch.uint8), tensor.contiguous().view(torch.uint8)):
                        wrong.append(f"{layout} interleave {interleave} TP {ranks} rank {rank} {name}")
    return compared, wrong


def seconds(function: Callable[[], object]) -> float:
    """Of one call on the device: the median of ROUNDS, after two."""
    times = []
    for _ in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[2:])


def speed(device: torch.device) -> list[dict[str, Any]]:
    from sm70_kernels.triton_sm70 import prepare_layer

    rows = []
    rng = np.random.default_rng(0)
    for name, count, hidden, intermediate, group, ranks in TIMED:
        for layout, interleave in itertools.product((*AWQ, *NVFP4), (False, True)):
            if layout in AWQ and intermediate // ranks % group:
                continue
            one = expert(rng, layout, hidden, intermediate, group)
            layer = [stack([one[i]] * count, device) for i in range(3)]
            out = banks(layout, count, hidden, intermediate, group, ranks, device)
            moved = sum(t.nbytes for p in layer for t in p if t is not None) + sum(t.nbytes for t in out.values())
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            copy = moved / seconds(lambda target=target, source=source: target.copy_(source)) / 1e9

            def run(layer: Any = layer, layout: str = layout, pairs: bool = interleave, out: Any = out) -> None:
                prepare_layer(*layer, layout=layout, interleave=pairs, outs=[out])

            rate = moved / seconds(run) / 1e9
            row = {"shape": name, "layout": layout, "interleave": interleave, "tp_size": ranks}
            rows.append(
                row | {"gb_per_second": round(rate, 1), "copy": round(copy, 1), "of_copy": round(rate / copy, 3)}
            )
            del layer, out, source, target
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device is here: nothing was run")
        return 2
    device = torch.device("cuda")
    about = f"{torch.cuda.get_device_name(device)}, sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}"
    compared, wrong = check(device)
    print(f"{about}: {compared} tensors compared with the reference, {len(wrong)} differ")
    print(*wrong[:10], sep="\n", end="\n" if wrong else "")
    rows = speed(device)
    print(f"{'shape':8} {'layout':12} {'interleave':10} tp {'GB/s':>7} {'copy':>7} of copy")
    for row in rows:
        print(
            f"{row['shape']:8} {row['layout']:12} {'on' if row['interleave'] else 'off':10} {row['tp_size']:2} "
            f"{row['gb_per_second']:7.1f} {row['copy']:7.1f} {row['of_copy']:7.3f}"
        )
    if options.json:
        document = {"device": about, "compared": compared, "wrong": wrong, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
