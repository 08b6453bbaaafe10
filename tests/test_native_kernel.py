"""The kernels that prepare whole layers: the runtime's ops (as fakes) against the reference, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from expert_banks import RAW_DTYPES, allocate, bits, prepare, random_awq, random_nvfp4
from fake_gpu import OPS, Call, native_ops
from sm70_kernels import native, torch_sm70
from sm70_kernels.spec import LayerProjection, Projection, RawScaleError

LAYOUTS = ("awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16", "nvfp4-raw")
HIDDEN, WIDTH, EXPERTS, GROUP = 64, 128, 3, 32
SIZES = (1, 2, 4)
PREPARE = {
    "awq-half2": "awq_sm70_prepare",
    "awq-compact": "awq_sm70_prepare_compact",
    "awq-int4zero": "awq_sm70_prepare_compact",
    "nvfp4-fp16": "nvfp4_sm70_prepare",
    "nvfp4-raw": "nvfp4_sm70_prepare",
}
EXPAND = "nvfp4_expand_raw_scales_sm70_out"


@pytest.fixture
def ops() -> Iterator[list[Call]]:
    with native_ops() as calls:
        yield calls


@dataclass
class Layer:
    experts: list[tuple[Projection, Projection, Projection]]
    projections: tuple[LayerProjection, LayerProjection, LayerProjection]


def layer_of(experts: list[tuple[Projection, Projection, Projection]]) -> Layer:
    """Experts as a kernel of layers gets them."""
    signed = {bits: dtype for dtype, bits in RAW_DTYPES.items() if dtype != torch.float8_e4m3fn}

    def stack(arrays: Sequence[Any]) -> torch.Tensor:
        array = np.stack(arrays)
        if array.dtype == np.uint8:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(np.int32 if array.dtype == np.uint32 else np.int16)).view(
            signed[array.dtype.type]
        )

    def join(index: int) -> LayerProjection:
        parts = [e[index] for e in experts]
        return LayerProjection(
            stack([p.weight for p in parts]),
            stack([p.scales for p in parts]),
            None if parts[0].zeros is None else stack([p.zeros for p in parts]),
            None if parts[0].global_scale is None else torch.tensor([float(str(p.global_scale)) for p in parts]),
        )

    return Layer(experts, (join(0), join(1), join(2)))


def random_layer(layout: str) -> Layer:
    rng = np.random.default_rng(sorted(LAYOUTS).index(layout))
    experts = []
    for number in range(EXPERTS):
        if layout.startswith("awq"):
            made = [random_awq(rng, k, n, GROUP) for k, n in ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))]
        else:
            # Raw codes are exact for powers of two; an interleaved bank needs like globals of gate and up.
            factors = (2.0**-5, 2.0**-5, 2.0**-6) if layout == "nvfp4-raw" else (0.0123, 0.0456, 0.789)
            made = [
                random_nvfp4(rng, k, n, f / (number + 1 if layout == "nvfp4-fp16" else 1))
                for (k, n), f in zip(((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)), factors, strict=True)
            ]
        experts.append((made[0], made[1], made[2]))
    return layer_of(experts)


def allocate_layer(layer: Layer, layout: str) -> list[dict[str, torch.Tensor]]:
    """Bank tensors [T, E, ...], filled with a pattern so that an unwritten word shows."""
    outs = []
    for tp_size in SIZES:
        out = {}
        for name, array in allocate(*layer.experts[0], layout=layout, tp_size=tp_size).items():
            dtype = {np.uint32: torch.int32, np.uint16: torch.float16, np.uint8: torch.uint8, np.float32: torch.float32}
            made = torch.empty((tp_size, len(layer.experts), *array.shape[1:]), dtype=dtype[array.dtype.type])
            made.view(torch.uint8).fill_(0xA5)
            out[name] = made
        outs.append(out)
    return outs


def run(kernel: Any, layer: Layer, layout: str, *, interleave: bool) -> list[dict[str, torch.Tensor]]:
    outs = allocate_layer(layer, layout)
    kernel(*layer.projections, layout=layout, interleave=interleave, outs=outs)
    return outs


def compare(outs: list[dict[str, torch.Tensor]], layer: Layer, layout: str, *, interleave: bool) -> int:
    """With the reference, expert by expert; gives the number of bytes."""
    compared = 0
    for number, expert in enumerate(layer.experts):
        banks = prepare("reference", *expert, layout=layout, interleave=interleave, tp_sizes=SIZES)
        for out, bank in zip(outs, banks, strict=True):
            assert set(out) == set(bank)
            for name, expected in bank.items():
                found = out[name][:, number].contiguous().view(torch.uint8).numpy().reshape(-1)
                assert np.array_equal(found, bits(expected).reshape(-1).view(np.uint8)), (layout, name, number)
                compared += found.size
    return compared


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", [torch_sm70, native], ids=["torch", "native"])
def test_a_layer_is_what_the_reference_makes_of_its_experts(
    kernel: Any, layout: str, interleave: bool, ops: list[Call]
) -> None:
    layer = random_layer(layout)
    outs = run(kernel.prepare_layer, layer, layout, interleave=interleave)
    assert compare(outs, layer, layout, interleave=interleave) == sum(t.nbytes for out in outs for t in out.values())
    assert bool(ops) == (kernel is native)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ops_are_called_as_the_runtime_calls_them(layout: str, interleave: bool, ops: list[Call]) -> None:
    run(native.prepare_layer, random_layer(layout), layout, interleave=interleave)
    op, awq, group = PREPARE[layout], layout.startswith("awq"), GROUP if layout.startswith("awq") else 16
    expected = []
    for tp_size in SIZES:
        for _ in range(tp_size):
            for k, n, pairwise in ((HIDDEN, 2 * WIDTH // tp_size, interleave), (WIDTH // tp_size, HIDDEN, False)):
                weight = (torch.int32, (k, n // 8)) if awq else (torch.uint8, (k, n))
                scales = (torch.float16, (k // group, n))
                zeros = [(torch.int32, (k // group, n // 8))] if awq else []
                expected += [Call(op, [weight, scales, *zeros], True, (group, pairwise))] * EXPERTS
                if layout == "nvfp4-raw":
                    out, codes = (torch.float16, (EXPERTS, k // 16, n)), (torch.uint8, (EXPERTS, k // 16, n))
                    factors = (torch.float32, (EXPERTS, 2 if n == 2 * WIDTH // tp_size and k == HIDDEN else 1))
                    expected += [Call(EXPAND, [out, codes, factors], True, (pairwise, fast)) for fast in (False, True)]
    assert ops == expected
    assert Counter(c.op for c in ops)[op] == 2 * EXPERTS * sum(SIZES)


def test_nan_scales_are_what_a_gpu_makes_of_them(ops: list[Call]) -> None:
    layer = random_layer("nvfp4-fp16")
    layer.experts[1][0].scales[0, 0] = 0x7F
    layer = layer_of(layer.experts)
    outs = run(native.prepare_layer, layer, "nvfp4-fp16", interleave=False)
    compare(outs, layer, "nvfp4-fp16", interleave=False)
    assert int(outs[0]["w13_tm_scales"].view(torch.int16)[0, 1, 0, 0]) == 0x7FFF


@pytest.mark.parametrize(("projection", "index", "expert"), [("gate", 0, 2), ("up", 1, 1), ("down", 2, 0)])
@pytest.mark.parametrize("kernel", [torch_sm70, native], ids=["torch", "native"])
@pytest.mark.parametrize("interleave", [False, True])
def test_raw_scales_that_do_not_come_back_name_the_expert_and_projection(
    kernel: Any, projection: str, index: int, expert: int, interleave: bool, ops: list[Call]
) -> None:
    layer = random_layer("nvfp4-raw")
    layer.experts[expert][index].scales[5, 1] = 0x03  # subnormal: the runtime's decode cannot read it
    layer = layer_of(layer.experts)
    with pytest.raises(RawScaleError) as caught:
        run(kernel.prepare_layer, layer, "nvfp4-raw", interleave=interleave)
    assert (caught.value.projection, caught.value.expert) == (projection, expert)
    assert caught.value.reason.startswith("code 0x03 with global 0.0")
    assert "(1 such scales)" in caught.value.reason


@pytest.mark.parametrize("missing", sorted(OPS))
def test_a_runtime_without_an_op_cannot_make_the_layouts_that_need_it(missing: str) -> None:
    needs = {
        layout for layout in LAYOUTS if missing == PREPARE[layout] or (missing == EXPAND and layout == "nvfp4-raw")
    }
    with native_ops(*(op for op in OPS if op != missing)) as calls:
        assert {layout for layout in LAYOUTS if native.missing_ops(layout)} == needs
        for layout in needs:
            with pytest.raises(RuntimeError, match=f"the runtime has no {missing}$"):
                run(native.prepare_layer, random_layer(layout), layout, interleave=False)
        assert calls == []
    assert all(native.missing_ops(layout) for layout in LAYOUTS)


SPOILS = [
    (
        lambda _, made: [made[0], made[1], -made[2]],
        "gives [k_ld, q_ld] = [-2048, -256] for w13, where a bank has [2048, 256]",
    ),
    (lambda _, made: [made[0].long(), *made[1:]], "gives torch.int64 [64, 32], where a bank has torch.int32 [64, 32]"),
    (
        lambda _, made: [made[0], made[1][:1], made[2]],
        "gives torch.int32 [1, 256], where a bank has torch.int32 [2, 256]",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILS, ids=["leading", "dtype", "shape"])
def test_an_op_that_gives_another_form_is_not_believed(spoil: Any, message: str) -> None:
    with native_ops(spoil=spoil), pytest.raises(RuntimeError) as caught:
        run(native.prepare_layer, random_layer("awq-half2"), "awq-half2", interleave=True)
    assert str(caught.value) == f"awq_sm70_prepare {message}"
