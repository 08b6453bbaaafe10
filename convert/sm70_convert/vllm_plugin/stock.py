"""The quantization config `sm70_prepared` of a stock vLLM: prepared experts to the reference, all else to the built-in one."""

# ruff: noqa: ARG003 - the signatures are vLLM's

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config
from vllm.platforms import current_platform

from sm70_convert.checkpoint import CONFIG
from sm70_convert.errors import Problem, UnsupportedError
from sm70_convert.layout import AWQ, NVFP4
from sm70_convert.vllm_plugin.folder import MARKER, check_marker, current
from sm70_convert.vllm_plugin.loader import NAME, explained
from sm70_convert.vllm_plugin.reference import PreparedMoEMethod, ReferenceLinearMethod


class _Prepared(QuantizationConfig):
    """What a built-in config becomes for a prepared folder. A subclass, so that models and vLLM find all else as they know it."""

    dense_format: str | None

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # plain torch

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            prepared = current()
            if prepared is None:
                what = "this is a prepared folder, and this load format fills no banks"
                with explained():
                    raise UnsupportedError(Problem(what, hint="start with --load-format sm70_prepared"))
            number = prepared.layer_of(prefix)
            if number is not None:
                return PreparedMoEMethod(layer.moe_config, prepared, number)
        method = super().get_quant_method(layer, prefix)
        quantised = isinstance(layer, LinearBase) and not isinstance(method, UnquantizedLinearMethod)
        if quantised and self.dense_format is not None and not self.built_in_runs():
            return ReferenceLinearMethod(self.dense_format, self.group_size)
        return method

    def built_in_runs(self) -> bool:
        """Whether vLLM has kernels for dense layers of this format here. They take no float32."""
        if get_current_vllm_config().model_config.dtype == torch.float32:
            return False
        if current_platform.is_cpu():
            return self.dense_format == AWQ
        capability = current_platform.get_device_capability()
        return capability is None or capability.to_int() >= super().get_min_capability()


class PreparedAwqConfig(_Prepared, AutoAWQConfig):
    """AWQ."""

    dense_format = AWQ


class PreparedModelOptConfig(_Prepared, ModelOptNvFp4Config):
    """ModelOpt NVFP4."""

    dense_format = NVFP4


class PreparedModelOptMixedConfig(_Prepared, ModelOptMixedPrecisionConfig):
    """ModelOpt MIXED_PRECISION: dense layers may be of any algorithm, all of them the built-in config's."""

    dense_format = None


class Sm70PreparedConfig(QuantizationConfig):
    """Claims prepared folders by their marker, and gives the config that fits the source format."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return NAME if hf_quant_cfg and hf_quant_cfg.get(MARKER) is not None else None

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        with explained():
            check_marker(config[MARKER])
        for built_in in (PreparedModelOptConfig, PreparedModelOptMixedConfig):
            if built_in.override_quantization_method(config, None) is not None:
                return built_in.from_config(config)
        if str(config.get("quant_method", "")).lower() == AWQ:
            return PreparedAwqConfig.from_config(config)
        what = f"the reference knows no dense layers of quant_method {config.get('quant_method')!r}"
        with explained():
            raise UnsupportedError(Problem(what, file=CONFIG, hint="use a V100 runtime"))


def register() -> None:
    """Registers the config. Repeating it does no harm."""
    register_quantization_config(NAME)(Sm70PreparedConfig)
