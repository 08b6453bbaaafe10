"""The load format `sm70_record`: a checkpoint is loaded and prepared as always, and the digests of the banks are written down.

    --load-format sm70_record --model-loader-extra-config '{"record_hashes": "FOLDER"}'    ("record_hash": "sha256" for SHA-256)

`sm70-convert verify DIR --against FOLDER` then says whether a prepared folder holds the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sm70_convert import names
from sm70_convert.bank import HASHES, make_folder
from sm70_convert.errors import IntegrityError, Problem, UnsupportedError, UsageError
from sm70_convert.layout import Layout, runtime_flags
from sm70_convert.recorded import Record, RecordedLayer, write_record
from sm70_convert.vllm_plugin import compat
from sm70_convert.vllm_plugin.folder import WINDOW, read_marker
from sm70_convert.vllm_plugin.loader import explained

NAME = "sm70_record"
FOLDER, HASH = "record_hashes", "record_hash"
_MATRICES = ("w13", "w2")


def register() -> None:
    """Registers the load format."""
    compat.LOADERS.setdefault(NAME, RecordingLoader)


class RecordingLoader(compat.DefaultModelLoader):
    """Loads as `auto` does, then records what the runtime prepared."""

    def __init__(self, load_config: Any) -> None:
        given = load_config.model_loader_extra_config
        extra = dict(given) if isinstance(given, Mapping) else {}
        with explained():
            self._folder = _folder(extra.pop(FOLDER, None))
            self._hash = _hash(extra.pop(HASH, "blake3"))
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, ready to run; its digests are on the disk."""
        with explained():
            if read_marker(Path(model_config.model)) is not None:
                raise UsageError(
                    Problem(
                        f"{NAME} records what a runtime prepares itself, and this folder is prepared already",
                        file=str(model_config.model),
                        hint="give the checkpoint that it was made from",
                    )
                )
            # Before the minutes that a load takes, so that a folder which cannot be written stops at once.
            make_folder(self._folder, self._folder)
            model: nn.Module = super().load_model(vllm_config, model_config, *args, **kwargs)
            if not compat.is_drafter(model_config):
                start = time.perf_counter()
                record = record_of(model, self._hash)
                path = write_record(self._folder, record, compat.stage(vllm_config))
                count = sum(len(entry.tensors) for entry in record.layers.values())
                compat.logger.info(
                    "sm70-convert: TP rank %d: %d digests of %d layers recorded in %s, in %.1f s",
                    record.rank, count, len(record.layers), path, time.perf_counter() - start,
                )  # fmt: skip
        return model


def record_of(model: nn.Module, hash_name: str) -> Record:
    """The digests of every bank that the runtime prepared in `model`. Raises UnsupportedError if it prepared none."""
    layers: dict[int, RecordedLayer] = {}
    places = set()
    for layer in compat.experts_layers(model):
        number = names.layer_inside_experts(f"{layer.layer_name}.")
        if number is None or not isinstance(getattr(layer, "w13_tm_weight", None), torch.Tensor):
            continue
        layers[number] = recorded_layer(layer, number, hash_name)
        places.add(compat.parallel(layer))
    if not layers:
        raise UnsupportedError(
            Problem(
                "this runtime prepared no SM70 banks, so there is nothing to record",
                hint="start a V100 runtime on its V100s, with an AWQ or NVFP4 MoE checkpoint that it serves by its SM70 kernels "
                """(ReVolta's skinny NVFP4 kernel is turned off with --kernel-config '{"sm70_skinny_moe": false}')""",
            )
        )
    if len(places) > 1 or any(place.experts for place in places):
        raise UnsupportedError(
            Problem(
                "experts are spread over the ranks, and banks are cut by tensor parallelism alone",
                hint="start without --enable-expert-parallel",
            )
        )
    (place,) = places
    return Record(place.rank, place.size, hash_name, dict(sorted(layers.items())))


def recorded_layer(layer: Any, number: int, hash_name: str) -> RecordedLayer:
    """The digests, layout and flags of one prepared layer, read off the layer itself."""
    tensors = bank_of(layer)
    name = layout_name(tensors)
    interleaved, q_ld = compat.interleaved(layer), compat.q_ld(layer)
    if name is None or interleaved is None:
        found = ", ".join(f"{n} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for n, t in tensors.items())
        raise UnsupportedError(
            Problem(
                f"the runtime prepared a layout that this tool does not know: {found}",
                layer=number,
                hint="use the sm70-convert that was made for this runtime's version",
            )
        )
    if q_ld is not None and (q_ld < 0) != (name in ("awq-compact", "awq-int4zero")):
        raise IntegrityError(
            Problem(f"the runtime's q_ld {q_ld} is not that of {name}, which its scales are", layer=number)
        )
    # The group size is no part of the flags.
    flags = runtime_flags(Layout(name, interleaved, 0))
    return RecordedLayer(
        name,
        interleaved,
        {tensor: digest_of(value, hash_name) for tensor, value in sorted(tensors.items())},
        {flag: os.environ[flag] for flag in sorted(flags) if flag in os.environ},
    )


def bank_of(layer: Any) -> dict[str, torch.Tensor]:
    """The tensors of a layer that make up its bank. With raw scales, `tm_scales` is scratch shared by all layers."""
    raw = hasattr(layer, "w13_raw_scale_codes")
    parts = ("tm_weight", "raw_scale_codes", "raw_global_scales") if raw else ("tm_weight", "tm_scales")
    return {f"{m}_{part}": getattr(layer, f"{m}_{part}").detach() for m in _MATRICES for part in parts}


def layout_name(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The layout that a bank's dtypes and shapes are of, or None."""
    if any(tensors[f"{m}_tm_weight"].dtype != torch.int32 for m in _MATRICES):
        return None
    if "w13_raw_scale_codes" in tensors:
        return "nvfp4-raw"
    scales = [tensors[f"{m}_tm_scales"] for m in _MATRICES]
    found = {(s.dtype, s.shape[-1] if s.ndim == 4 else None) for s in scales}
    if len(found) > 1:
        return None
    return {
        (torch.int32, None): "awq-half2",
        (torch.uint8, 3): "awq-compact",
        (torch.uint8, 5): "awq-int4zero",
        (torch.float16, None): "nvfp4-fp16",
    }.get(found.pop())


def digest_of(tensor: torch.Tensor, hash_name: str) -> str:
    """The digest of a tensor's bytes, brought to the host piece by piece."""
    digest = HASHES[hash_name]()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for begin in range(0, len(flat), WINDOW):
        digest.update(flat[begin : begin + WINDOW].cpu().numpy().data)
    return digest.hexdigest()


def _folder(value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise UsageError(
            Problem(
                f"--load-format {NAME} needs a folder to write to",
                hint=f"""add --model-loader-extra-config '{{"{FOLDER}": "FOLDER"}}'""",
            )
        )
    return Path(value).resolve()


def _hash(value: Any) -> str:
    if not isinstance(value, str) or value not in HASHES:
        hint = f"leave {HASH} out, or give the hash of the folder to compare with"
        raise UsageError(Problem(f"{HASH}: expected one of {', '.join(HASHES)}, found {value!r}", hint=hint))
    return value
