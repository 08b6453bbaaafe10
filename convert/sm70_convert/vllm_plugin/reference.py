"""Layers of a stock vLLM computed from packed weights with torch alone: slow, exact, for tests and for trying a folder out.

Weights stay packed. Every forward dequantises what it needs to fp32 and multiplies in fp32.
"""

# ruff: noqa: ARG001, ARG002 - the signatures are vLLM's and torch's

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from vllm.platforms import current_platform

from sm70_convert.errors import IntegrityError, Problem, UnsupportedError
from sm70_convert.layout import AWQ, NVFP4, Layout
from sm70_convert.vllm_plugin import compat
from sm70_convert.vllm_plugin.folder import PreparedFolder
from sm70_kernels import reference as kernels

PLAIN = ("w13_tm_weight", "w13_tm_scales", "w2_tm_weight", "w2_tm_scales")
NVFP4_RAW = (
    "w13_tm_weight", "w13_raw_scale_codes", "w13_raw_global_scales",
    "w2_tm_weight", "w2_raw_scale_codes", "w2_raw_global_scales",
)  # fmt: skip


class ReferenceMoEMethod(FusedMoEMethodBase):
    """Routed experts from bank tensors, which are parameters of the layer under their own names."""

    def __init__(self, moe: Any, layout: Layout) -> None:
        super().__init__(moe)
        self.layout = layout

    def get_fused_moe_quant_config(self, layer: Module) -> None:
        """None: no kernel of vLLM's runs."""

    def apply(self, layer: Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **extra: Any) -> Tensor:
        """This rank's share of the routed experts' output, like `x`."""
        names = NVFP4_RAW if self.layout.name == "nvfp4-raw" else PLAIN
        bank = [getattr(layer, name) for name in names]
        out: Tensor = routed_experts(x, topk_weights, topk_ids, bank, self.layout.name, self.layout.interleave_gate_up)
        return out


class PreparedMoEMethod(ReferenceMoEMethod):
    """The same with a bank of a prepared folder."""

    def __init__(self, moe: Any, prepared: PreparedFolder, number: int) -> None:
        super().__init__(moe, prepared.layout)
        self.prepared = prepared
        self.number = number

    def create_weights(
        self,
        layer: Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Registers the rank's bank, empty. The loader fills it."""
        place = compat.parallel(layer)
        check_computable(self.number, layer)
        self.prepared.check_tp_size(place.size)
        self.prepared.check_shape(
            self.number,
            place.size,
            experts=num_experts,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition,
        )
        bank = self.prepared.empty_parameters(self.number, place.rank, place.size)
        for name, tensor in bank.items():
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))
        compat.logger.warning_once(
            "sm70-convert: this vLLM has no SM70 kernels, so experts are dequantised and multiplied with plain torch. "
            "That is exact and very slow: for tests and for trying a folder out, not for serving."
        )

    def process_weights_after_loading(self, layer: Module) -> None:
        """Nothing to convert. Raises IntegrityError if the loader has not filled this bank."""
        if self.number not in self.prepared.report.layers:
            hint = "start with --load-format sm70_prepared"
            raise IntegrityError(Problem("bank was not filled", layer=self.number, hint=hint))


def check_computable(number: int, layer: Any) -> None:
    """Raises UnsupportedError if the runtime asks for something of the experts that the reference does not compute."""
    for reason, hint in _obstacles(layer):
        raise UnsupportedError(Problem(reason, layer=number, hint=hint))


def _obstacles(layer: Any) -> list[tuple[str, str]]:
    config = get_current_vllm_config()
    slow = "load the source checkpoint instead, or use a V100 runtime"
    found = []
    if compat.parallel(layer).experts:
        found.append(
            (
                "expert parallelism is not supported: a bank holds all experts, cut by tensor parallelism",
                "start without --enable-expert-parallel",
            )
        )
    if getattr(layer.activation, "value", layer.activation) != "silu" or getattr(layer, "swiglu_limit", None):
        found.append((f"the reference computes plain SiLU gating only, not {layer.activation}", slow))
    if layer.apply_router_weight_on_input or layer.moe_config.has_bias:
        found.append(("the reference has no expert biases and no router weights on the input", slow))
    if not current_platform.is_cpu() and not config.model_config.enforce_eager:
        found.append(
            ("the reference chooses experts on the host, which a CUDA graph cannot hold", "start with --enforce-eager")
        )
    return found


@register_weight_loader_v2_supported_method
class ReferenceLinearMethod(LinearMethodBase):
    """A dense AWQ or NVFP4 layer in the checkpoint's own tensors, where vLLM has no kernel. Activations are not quantised."""

    def __init__(self, quantization: str, group_size: int) -> None:
        self.quantization = quantization
        self.group_size = group_size

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Registers the source tensors of this rank, merged layers side by side."""
        k, n, groups = (
            input_size_per_partition,
            sum(output_partition_sizes),
            input_size_per_partition // self.group_size,
        )
        if k % self.group_size:
            raise UnsupportedError(
                Problem(
                    f"a dense layer with {k} in-features on a rank does not fall on groups of {self.group_size}",
                    hint="start with a smaller --tensor-parallel-size",
                )
            )
        loader = extra["weight_loader"]
        layer.register_buffer("sm70_widths", torch.tensor(output_partition_sizes), persistent=False)
        if self.quantization == AWQ:
            words = {"input_dim": 0, "output_dim": 1, "packed_dim": 1, "packed_factor": 8, "weight_loader": loader}
            layer.register_parameter(
                "qweight", PackedvLLMParameter(data=torch.empty(k, n // 8, dtype=torch.int32), **words)
            )
            layer.register_parameter(
                "qzeros", PackedvLLMParameter(data=torch.empty(groups, n // 8, dtype=torch.int32), **words)
            )
            # fp32 holds fp16 and bf16 scales alike, unrounded.
            scales = torch.empty(groups, n, dtype=torch.float32)
            layer.register_parameter(
                "scales", GroupQuantScaleParameter(data=scales, input_dim=0, output_dim=1, weight_loader=loader)
            )
            return
        rows = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        codes = torch.full((n, groups), float("nan"), dtype=torch.float32).to(torch.float8_e4m3fn)
        layer.register_parameter("weight", ModelWeightParameter(data=torch.empty(n, k // 2, dtype=torch.uint8), **rows))
        layer.register_parameter("weight_scale", ModelWeightParameter(data=codes, **rows))
        for name in ("weight_scale_2", "input_scale"):
            globals_ = torch.full((len(output_partition_sizes),), float("nan"), dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=globals_, weight_loader=loader))

    def process_weights_after_loading(self, layer: Module) -> None:
        """Leaves plain parameters. Raises IntegrityError if an NVFP4 scale was not in the checkpoint."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, Parameter(parameter.data, requires_grad=False))
        if self.quantization == NVFP4:
            del layer.input_scale
            if any(layer.get_parameter(name).float().isnan().any() for name in ("weight_scale", "weight_scale_2")):
                raise IntegrityError(
                    Problem("a dense NVFP4 layer has scales that are NaN or were not loaded", hint="convert again")
                )

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, in fp32, rounded to x's dtype."""
        names = (
            ("qweight", "scales", "qzeros")
            if self.quantization == AWQ
            else ("weight", "weight_scale", "weight_scale_2")
        )
        tensors: list[Tensor] = [layer.get_parameter(name) for name in names]
        if self.quantization == NVFP4:
            tensors[1:] = [tensors[1].view(torch.uint8), tensors[2], layer.get_buffer("sm70_widths")]
        out: Tensor = dense(x, tensors, bias, self.quantization)
        return out


# Opaque to torch.compile: the code below chooses experts on the host, and shares the definition of the layouts with the tool.


@torch.library.custom_op("sm70_convert::routed_experts", mutates_args=())
def routed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    bank: list[Tensor],
    layout: str,
    interleave: bool,
) -> Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)), fp32 inside."""
    names = NVFP4_RAW if layout == "nvfp4-raw" else PLAIN
    rows = x.float()
    total = torch.zeros_like(rows)
    with torch.device(x.device):
        for expert in sorted(set(topk_ids.flatten().tolist())):
            if expert < 0:  # padding
                continue
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            tensors = {name: tensor[expert] for name, tensor in zip(names, bank, strict=True)}
            gate, up, down = kernels.dequantise(tensors, layout=layout, interleave=interleave)
            inner = torch.nn.functional.silu(rows[token] @ gate.T) * (rows[token] @ up.T)
            total.index_add_(0, token, (inner @ down.T) * topk_weights[token, slot, None].float())
    return total.to(x.dtype)


@routed_experts.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sm70_convert::dense", mutates_args=())
def dense(x: Tensor, tensors: list[Tensor], bias: Tensor | None, quantization: str) -> Tensor:
    """x @ W + bias for a dense layer's source tensors; W is fp32 [K, N]."""
    with torch.device(x.device):
        weight = dequantise_awq(*tensors) if quantization == AWQ else dequantise_nvfp4(*tensors)
    out = x.float() @ weight
    return (out if bias is None else out + bias.float()).to(x.dtype)


@dense.register_fake
def _(x: Tensor, tensors: list[Tensor], bias: Tensor | None, quantization: str) -> Tensor:
    n = tensors[1].shape[1] if quantization == AWQ else tensors[0].shape[0]
    return x.new_empty((*x.shape[:-1], n))


def dequantise_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """AWQ words int32 [K, N/8], scales fp32 [G, N], zero words int32 [G, N/8] -> (q - z) * scale, fp32 [K, N]."""
    weight, zeros = (kernels.unpack_awq(words.long()) for words in (qweight, qzeros))
    group = len(weight) // len(zeros)
    return (weight - zeros.repeat_interleave(group, dim=0)) * scales.float().repeat_interleave(group, dim=0)


def dequantise_nvfp4(weight: Tensor, codes: Tensor, globals_: Tensor, widths: Tensor) -> Tensor:
    """NVFP4 bytes uint8 [N, K/2], e4m3 codes uint8 [N, K/16], each merged layer's fp32 global and width -> fp32 [K, N]."""
    values = torch.tensor(kernels.E2M1_VALUES, dtype=torch.float32)[kernels.unpack_nvfp4(weight.long())]
    scales = kernels.e4m3_values(codes) * globals_.repeat_interleave(widths)[:, None]
    return values * scales.repeat_interleave(kernels.NVFP4_GROUP, dim=1).T
