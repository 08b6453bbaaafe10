"""A quantization config that makes the banks at load from the source checkpoint, as a V100 runtime does: the other arm.

`register` is an entry point of the tests' own: `--quantization sm70_load_time` chooses it.
"""

# ruff: noqa: ARG003 - the signatures are vLLM's

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from sm70_convert.layout import Layout
from sm70_convert.vllm_plugin import compat
from sm70_convert.vllm_plugin.memory import MemoryWatch
from sm70_convert.vllm_plugin.reference import ReferenceMoEMethod
from sm70_convert.vllm_plugin.stock import PreparedAwqConfig, PreparedModelOptConfig
from sm70_kernels.reference import prepare_rank
from sm70_kernels.spec import Projection

NAME = "sm70_load_time"


class LoadTimeMethod(ReferenceMoEMethod):
    """Registers the source tensors as vLLM's own method does, then makes the bank expert by expert and stacks it."""

    def __init__(self, moe: Any, layout: Layout, quant_config: Any) -> None:
        super().__init__(moe, layout)
        self.quant_config = quant_config
        self.input_dtype, self.use_global_sf = None, False  # what the built-in create_weights reads

    def process_weights_after_loading(self, layer: Module) -> None:
        sources = {name: layer._parameters.pop(name) for name in list(layer._parameters)}
        experts = [
            prepare_rank(
                *self.projections({name: tensor[e] for name, tensor in sources.items()}),
                layout=self.layout.name,
                interleave=self.layout.interleave_gate_up,
                rank=0,  # vLLM has cut the sources for this rank
                tp_size=1,
            )
            for e in range(layer.local_num_experts)
        ]
        for name in experts[0]:
            bank = torch.stack([expert[name] for expert in experts])
            layer.register_parameter(name, Parameter(bank, requires_grad=False))

    def projections(self, source: dict[str, torch.Tensor]) -> tuple[Projection, Projection, Projection]:
        raise NotImplementedError


class LoadTimeAwqMethod(LoadTimeMethod):
    create_weights = AutoAWQMoEMethod.create_weights

    def projections(self, source: dict[str, torch.Tensor]) -> tuple[Projection, Projection, Projection]:
        def projection(matrix: str, part: int, parts: int) -> Projection:
            weight, scales, zeros = (
                source[f"{matrix}_{name}"].to(dtype).chunk(parts, dim=1)[part].numpy(force=True)
                for name, dtype in (("qweight", torch.int32), ("scales", torch.float16), ("qzeros", torch.int32))
            )
            return Projection(
                weight.view(np.uint32), np.ascontiguousarray(scales).view(np.uint16), zeros.view(np.uint32), None
            )

        return projection("w13", 0, 2), projection("w13", 1, 2), projection("w2", 0, 1)


class LoadTimeModelOptMethod(LoadTimeMethod):  # vLLM's loader looks for ModelOpt in the name
    create_weights = ModelOptNvFp4FusedMoE.create_weights

    def uses_weight_scale_2_pattern(self) -> bool:
        return True

    def projections(self, source: dict[str, torch.Tensor]) -> tuple[Projection, Projection, Projection]:
        def projection(matrix: str, part: int, parts: int) -> Projection:
            weight = source[f"{matrix}_weight"].chunk(parts)[part].numpy(force=True)
            codes = source[f"{matrix}_weight_scale"].view(torch.uint8).chunk(parts)[part].numpy(force=True)
            return Projection(weight, codes, None, np.float32(source[f"{matrix}_weight_scale_2"].view(-1)[part].item()))

        return projection("w13", 0, 2), projection("w13", 1, 2), projection("w2", 0, 1)


class _LoadTime:
    """Goes before the config of a prepared folder: dense layers are served alike in both arms."""

    def get_name(self) -> str:
        return NAME

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return self.experts_method(layer.moe_config)
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def experts_method(self, moe: Any) -> LoadTimeMethod:
        raise NotImplementedError


class LoadTimeAwqConfig(_LoadTime, PreparedAwqConfig):
    def experts_method(self, moe: Any) -> LoadTimeMethod:
        return LoadTimeAwqMethod(moe, Layout("awq-half2", True, self.group_size), self)


class LoadTimeModelOptConfig(_LoadTime, PreparedModelOptConfig):
    def experts_method(self, moe: Any) -> LoadTimeMethod:
        return LoadTimeModelOptMethod(moe, Layout("nvfp4-fp16", False, 16), self)


class LoadTimeConfig(QuantizationConfig):
    """Claims any checkpoint for which it is asked."""

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        return NAME if user_quant == NAME else None

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return (LoadTimeAwqConfig if config["quant_method"] == "awq" else LoadTimeModelOptConfig).from_config(config)


class WatchedLoader(DefaultModelLoader):
    """vLLM's loader, which says what memory the load took, as the one for prepared folders does."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def load_model(self, *args: Any, **kwargs: Any) -> Module:
        watch = MemoryWatch()
        model: Module = super().load_model(*args, **kwargs)
        compat.logger.info("load-time: transient memory of the whole load %.1f MiB", watch.transient() / 2**20)
        return model


def register() -> None:
    """The entry point."""
    compat.LOADERS.setdefault(NAME, WatchedLoader)
    register_quantization_config(NAME)(LoadTimeConfig)
