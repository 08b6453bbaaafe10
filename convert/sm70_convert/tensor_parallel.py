"""What a tensor-parallel rank owns, and which sizes are legal for a shape. Pure."""

from __future__ import annotations

from sm70_convert.layout import AWQ, Layout, MoeShape, QuantizationSpec

SHOWN_TP_SIZES = (1, 2, 4, 8, 16)
AWQ_GROUPS = (32, 64, 128)


def why_not_shape(quantization: QuantizationSpec, moe: MoeShape) -> str | None:
    """Why no TP size can work for this model, or None."""
    if moe.hidden % 32:
        return f"hidden size {moe.hidden} is not a multiple of 32, which a packed w2 needs"
    if moe.hidden % quantization.group_size:
        return f"hidden size {moe.hidden} is not a multiple of the group size {quantization.group_size}"
    if quantization.format == AWQ and quantization.group_size not in AWQ_GROUPS:
        return f"AWQ group size {quantization.group_size} is not one of 32, 64, 128"
    return None


def why_not(quantization: QuantizationSpec, moe: MoeShape, tp_size: int, layout: Layout | None = None) -> str | None:
    """Why `tp_size` is not legal, as one sentence, or None if it is."""
    if reason := why_not_shape(quantization, moe):
        return reason
    if moe.intermediate % tp_size:
        return f"the expert intermediate size {moe.intermediate} does not divide by {tp_size}"
    local = moe.intermediate // tp_size
    if local % quantization.group_size:
        return (
            f"each rank would hold {local} of the {moe.intermediate} intermediate channels, "
            f"not a multiple of the group size {quantization.group_size}"
        )
    if 2 * local % 32:
        return f"each rank's w13 would have {2 * local} columns, not a multiple of 32"
    if layout and layout.name == "nvfp4-raw" and layout.interleave_gate_up and local % 32:
        return f"an interleaved nvfp4-raw w13 needs a multiple of 32 intermediate channels a rank, not {local}"
    return None


def legal_sizes(quantization: QuantizationSpec, moe: MoeShape, layout: Layout | None = None) -> tuple[int, ...]:
    """The usual TP sizes (1 to 16) that are legal."""
    return tuple(size for size in SHOWN_TP_SIZES if why_not(quantization, moe, size, layout) is None)
