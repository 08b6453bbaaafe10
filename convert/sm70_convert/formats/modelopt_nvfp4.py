"""NVFP4 as ModelOpt writes it: NVFP4 (W4A4) and W4A16_NVFP4, whose experts' weights are alike.

One projection: weight U8 [N, K/2] (e2m1 codes, low nibble = even k), weight_scale F8_E4M3 [N, K/16], and the fp32 factor
weight_scale_2, [] or [1], that multiplies all scales. input_scale is for activations in 4 bits, which a V100 has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_convert.errors import CheckpointError, Problem, UnsupportedError
from sm70_convert.formats import Part, ScaleReport, SourceFormat
from sm70_convert.layout import NVFP4, QuantizationSpec
from sm70_kernels.scale_tables import nvfp4_scale_table
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 16
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_FP16_NORMAL = 2.0**-14
_SIGN = 0x80
_MAGNITUDES: list[float] = (
    nvfp4_scale_table(np.float32(1))[:_SIGN].view(np.float16).tolist()
)  # by code; fp16 holds them exactly


def spec(config: Mapping[str, Any], experts_modules: tuple[str, ...]) -> QuantizationSpec:
    """Reads ModelOpt's quantization_config in its flat and nested spelling.

    MIXED_PRECISION names an algorithm for each module; the keys may stop at `.experts`. Raises UnsupportedError where the experts
    are not NVFP4, CheckpointError for another group size than 16.
    """
    nested = config.get("quantization")
    fields: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    algorithm = str(fields.get("quant_algo", "")).upper()
    group_sizes = [fields.get("group_size"), _flat_group_size(fields)]
    if algorithm == "MIXED_PRECISION":
        layers = fields.get("quantized_layers")
        for name, entry in (layers if isinstance(layers, dict) else {}).items():
            if isinstance(entry, dict) and any(_covers(name, module) for module in experts_modules):
                _require(str(entry.get("quant_algo", "")).upper(), name)
                group_sizes.append(entry.get("group_size"))
    else:
        _require(algorithm, "quant_algo")
    for group_size in group_sizes:
        if group_size not in (None, GROUP):
            raise CheckpointError(
                Problem(
                    "NVFP4 has one scale for 16 values",
                    file="config.json",
                    expected="group_size 16",
                    actual=repr(group_size),
                )
            )
    return QuantizationSpec(NVFP4, 4, GROUP, zero_point=False)


def _flat_group_size(fields: Mapping[str, Any]) -> Any:
    """group_size where the flat spelling has it: config_groups.<any>.weights.group_size."""
    groups = fields.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and "group_size" in weights:
            return weights["group_size"]
    return None


def _covers(key: str, experts_module: str) -> bool:
    """Whether a quantized_layers key is about `experts_module` or a module in it."""
    return key == experts_module or key.startswith(f"{experts_module}.") or fnmatchcase(experts_module, key)


def _require(algorithm: str, where: str) -> None:
    if algorithm not in _ALGORITHMS:
        raise UnsupportedError(
            Problem(
                f"ModelOpt algorithm {algorithm or 'none'!r} of {where} is not supported",
                file="config.json",
                hint="only NVFP4 and W4A16_NVFP4 experts can be prepared",
            )
        )


def parts(k: int, n: int, group_size: int) -> dict[str, Part]:
    """The stored tensors of a projection with K in- and N out-features."""
    return {
        "weight": Part(("U8",), ((n, k // 2),)),
        "weight_scale": Part(("F8_E4M3",), ((n, k // group_size),)),
        "weight_scale_2": Part(("F32",), ((), (1,))),
    }


def group_of(k: int, scale_shape: tuple[int, ...]) -> int | None:
    """The group size that a scale tensor's shape says, or None if it says none."""
    groups = scale_shape[1] if len(scale_shape) == 2 else 0
    return k // groups if groups and k % groups == 0 else None


def projection(arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str]) -> Projection:  # noqa: ARG001 - one signature
    """Raw arrays (uint8, uint8 codes, float32 of one element) -> words."""
    return Projection(arrays["weight"], arrays["weight_scale"], None, arrays["weight_scale_2"].reshape(-1)[0])


def check_scales(p: Projection) -> ScaleReport:
    """Finds a NaN code, or a code whose product with the global scale is not finite in fp16."""
    assert p.global_scale is not None  # noqa: S101 - NVFP4 always has a global scale
    factor = float(p.global_scale)
    # One pass: without a sign the largest code is the largest scale.
    code = int(p.scales.max())
    negative = code > _SIGN
    if code >= _SIGN:
        code = int((p.scales & np.uint8(_SIGN - 1)).max())
    largest = _MAGNITUDES[code] * abs(factor)  # exact in fp64
    notes = []
    if code == 0:
        notes.append(("all block scales are zero", "weight_scale"))
    if negative:
        notes.append(("some block scales are negative", "weight_scale"))
    if factor == 0:
        notes.append(("global scale is zero", "weight_scale_2"))
    elif abs(factor) < _SMALLEST_NORMAL:
        notes.append(("global scale is subnormal", "weight_scale_2"))
    elif 0 < largest < _FP16_NORMAL and np.float16(np.float32(largest)) < _FP16_NORMAL:
        notes.append(("all scales are zero or subnormal in fp16", "weight_scale_2"))
    if factor < 0:
        notes.append(("global scale is negative", "weight_scale_2"))
    # Products grow with the code's magnitude, so the largest code decides. Its two roundings never lift it to 65520, which is
    # the first to overflow, from below this.
    if largest < 65519:
        return ScaleReport(largest, tuple(notes))
    table = nvfp4_scale_table(p.global_scale)
    bad = np.argwhere((table[p.scales] & np.uint16(0x7C00)) == 0x7C00)
    if not len(bad):
        return ScaleReport(largest, tuple(notes))
    row, group = (int(i) for i in bad[0])
    code = int(p.scales[row, group])
    if code & 0x7F == 0x7F:
        what = f"block scale code 0x{code:02x} is NaN"
    elif not np.isfinite(p.global_scale):
        what = f"global scale is {factor:g}"
    else:
        what = f"block scale code 0x{code:02x} times global scale {factor:g} overflows fp16"
    return ScaleReport(largest, tuple(notes), f"{what} at row {row}, group {group} ({len(bad)} in all)")


FORMAT = SourceFormat(
    name=NVFP4,
    marker="weight_scale",
    ignored=frozenset({"input_scale"}),
    spec=spec,
    parts=parts,
    projection=projection,
    check_scales=check_scales,
    scale_part="weight_scale",
    group_of=group_of,
    global_part="weight_scale_2",
)
