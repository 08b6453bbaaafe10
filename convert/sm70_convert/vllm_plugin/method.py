"""The MoE methods of V100 runtimes, taught to take banks: sources stay on meta, the runtime's own code runs over banks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from sm70_convert.errors import IntegrityError, Problem, UnsupportedError
from sm70_convert.vllm_plugin import compat
from sm70_convert.vllm_plugin.folder import PreparedFolder, current, is_loading, read_marker
from sm70_convert.vllm_plugin.replay import Replay

# Module and class of each method, and the source format that it takes.
METHODS = {"awq_sm70_moe": "AWQSM70MoEMethod", "nvfp4_sm70_moe": "ModelOptNvFp4SM70MoEMethod"}


def register() -> None:
    """Puts the subclasses where the runtime looks its methods up. Does nothing on a vLLM without them."""
    for module_name, name in METHODS.items():
        module = compat.quantization_module(module_name)
        if module is not None and not issubclass(getattr(module, name), _TakesBanks):
            setattr(module, name, takes_banks(getattr(module, name)))


def takes_banks(base: type[Any]) -> type[Any]:
    """A subclass of a runtime's method, under the same name (the runtime compares names)."""
    return type(base.__name__, (_TakesBanks, base), {"__module__": __name__, "__doc__": base.__doc__})


class _TakesBanks:
    """Goes before a runtime's method. A layer without a bank is the runtime's own affair."""

    prepared: PreparedFolder | None = None
    number: int
    sources: dict[str, Parameter]

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Registers the bank, empty, in place of the sources."""
        folder = current()
        number = folder.layer_of(layer.layer_name) if folder else None
        given = dict(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            params_dtype=params_dtype,
            **extra,
        )
        if folder is None or number is None:
            _refuse_without_loader()
            super().create_weights(layer=layer, **given)  # type: ignore[misc]
            return
        place = compat.parallel(layer)
        if place.experts:
            raise UnsupportedError(
                Problem(
                    "expert parallelism is not supported: a bank holds all experts, cut by tensor parallelism",
                    layer=number,
                    hint="start without --enable-expert-parallel",
                )
            )
        folder.check_tp_size(place.size)
        folder.check_shape(
            number,
            place.size,
            experts=num_experts,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition,
        )
        before = set(layer._parameters)
        with torch.device("meta"):
            super().create_weights(layer=layer, **given)  # type: ignore[misc]
        # In a plain dict, so that neither the loader nor a coverage check of the runtime sees them.
        self.sources = {name: layer._parameters.pop(name) for name in [*layer._parameters] if name not in before}
        self.prepared, self.number = folder, number
        for name, tensor in folder.empty_parameters(number, place.rank, place.size).items():
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Runs the runtime's own code over the bank. Raises IntegrityError if the bank was not filled."""
        folder = self.prepared
        if folder is None:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            return
        if self.number not in folder.report.layers:
            hint = "start with --load-format sm70_prepared"
            raise IntegrityError(Problem("bank was not filled", layer=self.number, hint=hint))
        if not self.sources:
            hint = "start the runtime anew with the new weights"
            raise UnsupportedError(Problem("a bank cannot be loaded twice", layer=self.number, hint=hint))
        place = compat.parallel(layer)
        banks = {name: layer._parameters.pop(name) for name in folder.tensor_names}
        layer._parameters.update(self.sources)
        self.sources = {}
        with Replay(banks, folder.layout, folder.moe, self.number, place.rank, place.size):
            super().process_weights_after_loading(layer)  # type: ignore[misc]


def _refuse_without_loader() -> None:
    """Raises UnsupportedError if a prepared folder is being loaded by a load format that fills no banks."""
    model = None if is_loading() else compat.model_being_built()
    if model is not None and read_marker(Path(model)) is not None:
        hint = "start with --load-format sm70_prepared"
        raise UnsupportedError(
            Problem("is a prepared folder, and this load format fills no banks", file=model, hint=hint)
        )
