"""The load format `sm70_prepared`: everything but the experts as vLLM loads it, banks straight from their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sm70_convert import names
from sm70_convert.errors import IntegrityError, Problem, Sm70Error, UnsupportedError, UsageError
from sm70_convert.vllm_plugin import compat
from sm70_convert.vllm_plugin.folder import PreparedFolder, loading
from sm70_convert.vllm_plugin.memory import MemoryWatch

NAME = "sm70_prepared"
# Load formats that also take a prepared folder: ReVolta's PLE disk cascade works under these two names alone.
WRAPPED = ("auto", "safetensors")


def register() -> None:
    """Registers the load format, and puts it before the everyday ones."""
    compat.LOADERS.setdefault(NAME, prepared(compat.DefaultModelLoader, strict=True))
    for name in WRAPPED:
        if not issubclass(compat.LOADERS[name], _Prepared):
            compat.LOADERS[name] = prepared(compat.LOADERS[name])


def prepared(base: type[Any], *, strict: bool = False) -> type[Any]:
    """A loader class that loads prepared folders, and everything else as `base` does. strict: a prepared folder only."""
    return type(f"Prepared{base.__name__}", (_Prepared, base), {"strict": strict, "__doc__": base.__doc__})


class _Prepared:
    """Goes before a DefaultModelLoader."""

    strict: bool
    load_config: Any

    def __init__(self, load_config: Any) -> None:
        extra = load_config.model_loader_extra_config
        self._verify = bool(extra.get("verify", False)) if isinstance(extra, dict) else False
        if self._verify or (isinstance(extra, dict) and "verify" in extra):
            extra = {key: value for key, value in extra.items() if key != "verify"}
            load_config = replace(load_config, model_loader_extra_config=extra)
        super().__init__(load_config)  # type: ignore[call-arg]
        self._given = load_config
        self._opened: tuple[str, PreparedFolder | None] | None = None
        self._expected: frozenset[int] = frozenset()

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, ready to run. What goes wrong with a prepared folder is logged with what to do about it."""
        with explained():
            folder = self._open(model_config)
            if folder is not None and not compat.is_drafter(model_config):
                stage = compat.stage_layers(vllm_config, model_config)
                self._expected = frozenset(layer for layer in folder.moe.layers if layer in stage)
            watch = MemoryWatch()
            with loading(folder):
                model: nn.Module = super().load_model(vllm_config, model_config, *args, **kwargs)  # type: ignore[misc]
            if folder is not None and folder.report.layers:
                compat.logger.info("%s", summary(folder, watch))
        return model

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Checks this rank's banks, streams what passes through, fills the banks."""
        folder = self._open(model_config)
        if folder is None:
            super().load_weights(model, model_config)  # type: ignore[misc]
            return
        layers = bank_layers(folder, model)
        if missing := self._expected - layers.keys():
            raise IntegrityError(
                Problem(
                    f"the model has no routed experts in layers {names.format_ranges(missing)}, which have banks",
                    file=str(folder.root),
                    hint="this runtime builds the model in another way than the plugin knows: please report it",
                )
            )
        places = {number: compat.parallel(layer) for number, layer in layers.items()}
        for number, place in places.items():
            folder.bank(number, place.rank, place.size)
        folder.check_passthrough()
        super().load_weights(model, model_config)  # type: ignore[misc]
        for number, layer in layers.items():
            folder.fill(bank_parameters(folder, layer), number, places[number].rank, places[number].size)

    def get_all_weights(self, model_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The tensors that pass through: all that the index lists, without the sentinel."""
        folder = self._open(model_config)
        weights = super().get_all_weights(model_config, model, *args, **kwargs)  # type: ignore[misc]
        if folder is None:
            yield from weights
            return
        unlisted = folder.unlisted()
        yield from ((name, tensor) for name, tensor in weights if name not in unlisted)

    def download_model(self, model_config: Any) -> None:
        """Nothing to do for a prepared folder, which is always local."""
        if self._open(model_config) is None:
            super().download_model(model_config)  # type: ignore[misc]

    def _open(self, model_config: Any) -> PreparedFolder | None:
        """The prepared folder of a model, and this loader's settings changed to suit it; None if it is something else."""
        model = str(model_config.model)
        if self._opened is None or self._opened[0] != model:
            folder = PreparedFolder.open(model, verify=self._verify)
            if folder is None and not compat.is_drafter(model_config):
                self._refuse_others(model)
            self._opened = model, folder
            form = "safetensors" if folder else "auto" if self.strict else self._given.load_format
            self.load_config = replace(self._given, load_format=form)
        return self._opened[1]

    def _refuse_others(self, model: str) -> None:
        if self.strict:
            local = Path(model).is_dir()
            raise UsageError(
                Problem(
                    "is not a prepared folder" if local else "is no folder on this machine",
                    file=model,
                    hint=f"make one with: sm70-convert {model} --out DIR --tp-size N"
                    if local
                    else f"fetch it first (hf download {model} --local-dir DIR) and give DIR",
                )
            )
        if self._verify:
            raise UsageError(
                Problem("verify is for prepared folders, and this is none", file=model, hint="leave verify out")
            )


def bank_layers(folder: PreparedFolder, model: nn.Module) -> dict[int, Any]:
    """The layers of a model that have banks. Raises UnsupportedError if the runtime gave one to a method that takes none."""
    layers = {}
    for layer in compat.experts_layers(model):
        number = folder.layer_of(layer.layer_name)
        if number is None:
            continue
        if not bank_parameters(folder, layer):
            method = compat.method_of(layer)
            hint = f"this runtime and device take no {folder.layout.name} banks: serve the source checkpoint here"
            if compat.is_skinny(method):
                hint = """turn the skinny kernel off: --kernel-config '{"sm70_skinny_moe": false}'"""
            raise UnsupportedError(
                Problem(
                    "the runtime sends this layer's experts to a method that takes no banks",
                    layer=number,
                    expected=f"an SM70 method for {folder.layout.name}",
                    actual=type(method).__name__,
                    hint=hint,
                )
            )
        layers[number] = layer
    return layers


def bank_parameters(folder: PreparedFolder, layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a layer that hold its bank."""
    parameters = ((name, layer._parameters.get(name)) for name in folder.tensor_names)
    return {name: parameter for name, parameter in parameters if parameter is not None}


def summary(folder: PreparedFolder, watch: MemoryWatch) -> str:
    """One line about a load."""
    report = folder.report
    return (
        f"sm70-convert: TP rank {report.rank}: {report.bytes / 1e9:.3f} GB of {folder.layout.name} banks, "
        f"{len(report.layers)} layers, in {report.seconds:.2f} s ({report.gigabytes_per_second:.2f} GB/s); "
        f"transient memory of the whole load {watch.transient() / 2**20:.1f} MiB ({watch.unit})"
    )


@contextmanager
def explained() -> Iterator[None]:
    """An error of this tool says all its problems and next steps, in the log and in what vLLM raises."""
    try:
        yield
    except Sm70Error as exc:
        exc.args = ("\n".join(exc.lines()),)
        compat.logger.error("%s", exc)
        raise
