"""Layout: the target of a preparation as data, and which layout a runtime asks for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

AWQ, NVFP4 = "awq", "nvfp4"

# Layout names by source format, the everyday one of each first.
LAYOUTS = {
    AWQ: ("awq-half2", "awq-compact", "awq-int4zero"),
    NVFP4: ("nvfp4-fp16", "nvfp4-raw"),
}
LAYOUT_NAMES = tuple(name for names in LAYOUTS.values() for name in names)
RUNTIMES = ("revolta", "1cat")

_QWEN38 = (512, 2560, 640, 10)
# (experts, hidden, intermediate, top-k) -> TP sizes at which ReVolta 0.1.4 takes NVFP4 banks at all.
_REVOLTA_NVFP4 = {_QWEN38: (1, 2, 4), (256, 2048, 512, 8): (1, 2, 4), (288, 4096, 2048, 8): (1, 2, 4, 8)}


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """How the experts are quantised in the checkpoint. group_size counts in-features that share a scale."""

    format: str
    bits: int
    group_size: int
    zero_point: bool


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The experts of one model. layers are the decoder layers that have quantised experts."""

    layers: tuple[int, ...]
    experts: int
    hidden: int
    intermediate: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What the banks hold: the name of the scales' form, whether w13 interleaves gate and up, and the group size."""

    name: str
    interleave_gate_up: bool
    group_size: int


@dataclass(frozen=True, slots=True)
class BankTensor:
    """One tensor of one expert in a bank: its safetensors dtype and its shape without the leading number of experts."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


ITEMSIZE = {"I32": 4, "F32": 4, "F16": 2, "U8": 1}


def bank_tensors(layout: Layout, moe: MoeShape, tp_size: int) -> tuple[BankTensor, ...]:
    """The tensors of one rank's bank, in safetensors' own order (item size descending, dtype, then name)."""
    width = 2 * (moe.intermediate // tp_size)
    tensors: list[BankTensor] = []
    for matrix, k, n in (("w13", moe.hidden, width), ("w2", width // 2, moe.hidden)):
        groups = k // layout.group_size
        tensors.append(BankTensor(f"{matrix}_tm_weight", "I32", (k, n // 8)))
        if layout.name == "awq-half2":
            tensors.append(BankTensor(f"{matrix}_tm_scales", "I32", (groups, n)))
        elif layout.name == "awq-compact":
            tensors.append(BankTensor(f"{matrix}_tm_scales", "U8", (groups, n, 3)))
        elif layout.name == "awq-int4zero":
            tensors.append(BankTensor(f"{matrix}_tm_scales", "U8", (groups, n // 2, 5)))
        elif layout.name == "nvfp4-fp16":
            tensors.append(BankTensor(f"{matrix}_tm_scales", "F16", (groups, n)))
        else:
            tensors.append(BankTensor(f"{matrix}_raw_scale_codes", "U8", (groups, n)))
            tensors.append(BankTensor(f"{matrix}_raw_global_scales", "F32", (2 if matrix == "w13" else 1,)))
    order = ["F32", "I32", "F16", "U8"]
    return tuple(sorted(tensors, key=lambda t: (order.index(t.dtype), t.name)))


def leading_dimensions(layout: Layout, moe: MoeShape, tp_size: int) -> dict[str, int]:
    """The runtime's k_ld (elements between 32-column tiles: 32 K) and q_ld (N; negative for the two byte-packed AWQ scales)."""
    width = 2 * (moe.intermediate // tp_size)
    sign = -1 if layout.name in ("awq-compact", "awq-int4zero") else 1
    return {
        "w13_k_ld": 32 * moe.hidden,
        "w13_q_ld": sign * width,
        "w2_k_ld": 32 * (width // 2),
        "w2_q_ld": sign * moe.hidden,
    }


def asked_layout(runtime: str, quantization: QuantizationSpec, moe: MoeShape, tp_size: int) -> Layout:
    """The layout that `runtime` asks for by its defaults.

    ReVolta 0.1.4 takes compact AWQ scales and raw NVFP4 codes for the Qwen3.8-Flash-Next shape at TP 4 only; every AWQ w13 is
    interleaved, an NVFP4 one for that shape alone.
    """
    qwen38 = (moe.experts, moe.hidden, moe.intermediate, moe.top_k) == _QWEN38 and tp_size == 4 and runtime == "revolta"
    if quantization.format == AWQ:
        # The runtime looks at the local weight shapes and the group size alone, not at top-k.
        local = (moe.experts, moe.hidden, moe.intermediate // tp_size, quantization.group_size)
        compact = runtime == "revolta" and local == (512, 2560, 160, 32)
        return Layout("awq-compact" if compact else "awq-half2", True, quantization.group_size)
    return Layout("nvfp4-raw" if qwen38 else "nvfp4-fp16", qwen38, quantization.group_size)


def runtime_takes(runtime: str, quantization: QuantizationSpec, moe: MoeShape, tp_size: int) -> str | None:
    """Why `runtime` would load no banks of this shape, as one sentence, or None if it would."""
    if quantization.format == AWQ:
        return None
    if runtime == "1cat":
        return "1Cat-vLLM (August 2026) has no NVFP4 MoE kernels for SM70: it loads no NVFP4 banks"
    shape = (moe.experts, moe.hidden, moe.intermediate, moe.top_k)
    if tp_size not in _REVOLTA_NVFP4.get(shape, ()):
        return (
            f"ReVolta 0.1.4 takes NVFP4 banks only for its own list of shapes; (experts, hidden, intermediate, top-k) = {shape} "
            f"at TP {tp_size} is not in it"
        )
    return None


def runtime_flags(layout: Layout) -> dict[str, str]:
    """The runtime's environment settings under which it asks for this layout (where the shape allows it)."""
    interleave = "1" if layout.interleave_gate_up else "0"
    if layout.name.startswith("awq"):
        return {
            "VLLM_SM70_AWQ_MOE_COMPACT_METADATA": "0" if layout.name == "awq-half2" else "1",
            "VLLM_SM70_AWQ_MOE_INT4_ZERO": "1" if layout.name == "awq-int4zero" else "0",
            "VLLM_SM70_AWQ_MOE_BATCHED_GEMM": interleave,
        }
    return {
        "VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE": "1" if layout.name == "nvfp4-raw" else "0",
        "VLLM_SM70_NVFP4_QWEN38_MOE_FUSED_SWIGLU_PREFILL": interleave,
    }
