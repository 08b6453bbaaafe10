"""AWQ in AutoAWQ's gemm form, as AutoAWQ and GPTQModel write it.

One projection: qweight I32 [K, N/8], qzeros I32 [K/g, N/8] (used as stored, no +1), scales F16 or BF16 [K/g, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_convert.errors import CheckpointError, Problem, UnsupportedError
from sm70_convert.formats import Part, ScaleReport, SourceFormat, contradiction
from sm70_convert.layout import AWQ, QuantizationSpec
from sm70_kernels.scale_tables import bf16_to_fp16
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from numpy.typing import NDArray

# AutoAWQ stores column 8c + j of a word in nibble _NIBBLE[j].
_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
_FP16_MAX = 65504.0
_FP16_NORMAL, _FP16_SIGN = 0x0400, 0x8000  # bits of the smallest normal number, and of -0.0


def spec(config: Mapping[str, Any], experts_modules: tuple[str, ...]) -> QuantizationSpec:  # noqa: ARG001 - one signature
    """Reads AutoAWQ's or GPTQModel's quantization_config.

    Raises CheckpointError for fields that make no sense, UnsupportedError for an AWQ that is not 4-bit asymmetric gemm.
    """
    bits = config.get("bits", config.get("w_bit"))
    group_size = config.get("group_size", config.get("q_group_size"))
    zero_point = config.get("zero_point")
    for keys in (("bits", "w_bit"), ("group_size", "q_group_size")):
        if problem := contradiction(config, keys):
            raise CheckpointError(problem)
    version = str(config.get("version", config.get("checkpoint_format", "gemm"))).lower()
    if type(bits) is not int or type(group_size) is not int or group_size < -1 or group_size == 0:
        raise CheckpointError(
            Problem(
                "quantization_config has no usable bits and group_size",
                file="config.json",
                expected="whole numbers",
                actual=f"bits {bits!r}, group_size {group_size!r}",
            )
        )
    for wrong, what in (
        (bits != 4, f"{bits}-bit AWQ"),
        (zero_point is not True, "symmetric AWQ (zero_point is not true)"),
        (version != "gemm", f"AWQ version {version!r}"),
        (group_size == -1, "AWQ with one group a column (group_size -1)"),
        (bool(config.get("desc_act")), "AWQ with act-order (desc_act)"),
        (group_size > 128, f"AWQ with groups of {group_size}"),
    ):
        if wrong:
            raise UnsupportedError(
                Problem(
                    f"{what} is not supported",
                    file="config.json",
                    hint="only 4-bit AWQ, version gemm, with zero points, can be prepared",
                )
            )
    return QuantizationSpec(AWQ, bits, group_size, zero_point=True)


def parts(k: int, n: int, group_size: int) -> dict[str, Part]:
    """The stored tensors of a projection with K in- and N out-features."""
    groups = k // group_size
    return {
        "qweight": Part(("I32",), ((k, n // 8),)),
        "qzeros": Part(("I32",), ((groups, n // 8),)),
        "scales": Part(("F16", "BF16"), ((groups, n),)),
    }


def group_of(k: int, scale_shape: tuple[int, ...]) -> int | None:
    """The group size that a scale tensor's shape says, or None if it says none."""
    groups = scale_shape[0] if len(scale_shape) == 2 else 0
    return k // groups if groups and k % groups == 0 else None


def projection(arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str]) -> Projection:
    """Raw arrays (uint32 words; uint16 bits of the scales) -> words. bf16 scales are rounded to fp16, as on a V100."""
    scales = arrays["scales"]
    return Projection(
        arrays["qweight"],
        bf16_to_fp16(scales) if dtypes["scales"] == "BF16" else scales,
        arrays["qzeros"],
        None,
    )


def check_scales(p: Projection) -> ScaleReport:
    """Finds a scale that is no number, or whose product with its zero point overflows fp16."""
    # One pass decides nearly always: without a sign the largest bits are the largest scale, and 15 is the largest zero point.
    bits = int(p.scales.max())
    negative = bits > _FP16_SIGN
    if bits >= _FP16_SIGN:
        bits = int((p.scales & np.uint16(_FP16_SIGN - 1)).max())
    largest = float(np.uint16(bits).view(np.float16))
    notes = []
    if bits == 0:
        notes.append(("all scales are zero", "scales"))
    elif bits < _FP16_NORMAL:
        notes.append(("all scales are zero or subnormal in fp16", "scales"))
    if negative:
        notes.append(("some scales are negative", "scales"))
    if largest * 15 <= _FP16_MAX:
        return ScaleReport(largest, tuple(notes))
    assert p.zeros is not None  # noqa: S101 - AWQ always has zero points
    scales = p.scales.view(np.float16)
    shifts = np.array([4 * nibble for nibble in _NIBBLE], np.uint32)
    zeros = ((p.zeros[..., None] >> shifts) & np.uint32(15)).reshape(scales.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        bias = (scales.astype(np.float32) * zeros.astype(np.float32)).astype(np.float16)
    bad = np.argwhere(~np.isfinite(scales) | ~np.isfinite(bias))
    if not len(bad):
        return ScaleReport(largest, tuple(notes))
    group, column = (int(i) for i in bad[0])
    scale, zero = float(scales[group, column]), int(zeros[group, column])
    what = f"scale {scale:g} times zero point {zero}" if np.isfinite(scale) else f"scale {scale:g}"
    state = "overflows fp16" if np.isfinite(scale) else "is not finite in fp16"
    reason = f"{what} {state} at group {group}, column {column} ({len(bad)} in all)"
    return ScaleReport(largest, tuple(notes), reason)


FORMAT = SourceFormat(
    name=AWQ,
    marker="qweight",
    ignored=frozenset(),
    spec=spec,
    parts=parts,
    projection=projection,
    check_scales=check_scales,
    scale_part="scales",
    group_of=group_of,
)
