"""Runs in a V100 runtime's environment: what `sm70_record` writes of the runtime's own conversion, against prepared folders.

PYTHONPATH=<runtime>:... python record_contract.py WORK CASE ...
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sm70_contract as contract
import torch
from click.testing import CliRunner
from sm70_contract import COMPACT, FLAGS, FULL, FUSED, INTERLEAVE, OWN, SMALL, TP, WORK, flags
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import base_loader, get_model_loader

from sm70_convert import names
from sm70_convert.cli import main
from sm70_convert.recorded import Record, read_record
from sm70_convert.vllm_plugin import plugin
from sm70_convert.vllm_plugin.record import digest_of, record_of, recorded_layer

FLIP = (1, 2)  # layer and expert of the flipped byte; the last byte of a tensor is the last rank's
SHARDS = {"gate": "w1", "up": "w3", "down": "w2"}


class LoadedModel(contract.TinyModel):
    """Hands what the runtime's loader streams to the runtime's own loader of experts, which cuts it for the rank."""

    def __init__(self, layers: Mapping[int, Any], flipped: str) -> None:
        super().__init__(layers)
        self.flipped = flipped

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.seen.append(name)
            expert = names.parse(name)
            if expert is None or str(expert.layer) not in self.layers:
                continue
            layer, shard = self.layers[str(expert.layer)], SHARDS[expert.projection]
            parameter = f"{'w2' if shard == 'w2' else 'w13'}_{expert.part}"
            value = tensor.clone()
            if (self.flipped, expert.layer, expert.expert) == (f"{expert.projection}.{expert.part}", *FLIP):
                value.view(torch.uint8).view(-1)[-1] ^= 1
            target = layer._parameters[parameter]
            target.weight_loader(target, value, name, shard_id=shard, expert_id=expert.expert)
            loaded.add(f"layers.{expert.layer}.{parameter}")
        return loaded


def loading_layer(number: int, rank: int, format_: str, use_ep: bool) -> Any:
    """A layer that the runtime's own loader of experts can fill."""
    layer = contract.new_layer(f"model.layers.{number}.mlp.experts", SMALL, rank, TP)
    layer.moe_parallel_config = layer.moe_config.moe_parallel_config
    layer.moe_parallel_config.use_ep = use_ep
    module, name = contract.METHODS_OF[format_]
    contract.create(contract.new_method(getattr(module, name), format_, layer), layer, SMALL, TP)
    layer.quant_config = SimpleNamespace(get_name=lambda: format_)
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert)
    for parameter in layer._parameters.values():
        parameter.weight_loader = layer.weight_loader
    return layer


def record(source: Path, target: Path, format_: str, **change: Any) -> list[Any]:
    """A start of each rank with `--load-format sm70_record`, by the runtime's real loader."""
    plugin.register()
    plugin.register()
    models = []
    for rank in range(TP):
        config = VllmConfig()
        stages = change.get("stages", 1)
        model_config = SimpleNamespace(
            model=str(source),
            revision=None,
            quantization=format_,
            runner_type=change.get("runner_type", "generate"),
            dtype=torch.float16,
            is_moe=True,
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
        )
        for stage in range(stages):
            vllm_config = SimpleNamespace(
                model_config=model_config,
                parallel_config=SimpleNamespace(
                    pipeline_parallel_size=stages, tensor_parallel_size=TP, rank=stage * TP + rank
                ),
                load_config=SimpleNamespace(device=None),
                device_config=SimpleNamespace(device="cpu"),
                quant_config=None,
            )
            numbers = range(SMALL["layers"]) if stages == 1 else (stage,)

            def build(*, numbers: Any = numbers, rank: int = rank, **_: Any) -> nn.Module:
                layers = {n: loading_layer(n, rank, format_, change.get("use_ep", False)) for n in numbers}
                return LoadedModel(layers, change.get("flipped", ""))

            base_loader.initialize_model = build
            base_loader.log_model_inspection = lambda _: None
            extra = {"record_hashes": str(target), **change.get("extra", {})}
            loader = get_model_loader(LoadConfig(load_format="sm70_record", model_loader_extra_config=extra))
            assert type(loader).__name__ == "RecordingLoader"
            with set_current_vllm_config(config):
                models.append(loader.load_model(vllm_config, model_config))
            assert len(models[-1].seen) > 0
    return models


def verify(folder: Path, target: Path) -> dict[str, Any]:
    """What `sm70-convert verify FOLDER --against TARGET` says."""
    result = CliRunner().invoke(main, ["verify", str(folder), "--against", str(target), "--json"])
    document = json.loads(result.stdout)
    problems = [
        {k: p.get(k) for k in ("tensor", "layer", "rank", "message")}
        for p in document.get("error", {}).get("problems", [])
    ]
    return {"exit_code": result.exit_code, "against": document.get("against"), "problems": problems}


def recorded(format_: str, layout: str, interleave: bool, **change: Any) -> dict[str, Any]:
    """A recorded start of every rank under the layout's settings, held against the converter's folder."""
    source, folder = contract.folder_of(format_, layout, interleave)
    target = WORK / f"recorded-{layout}-{interleave}-{'-'.join(map(str, change))}"
    settings = FLAGS[layout] | {INTERLEAVE: "1" if interleave else "0"}
    with flags(settings), contract.small_compact_shape():
        record(source, target, format_, **change)
    files = sorted(p.name for p in target.iterdir())
    entry = next(iter(read_record(target / files[0]).layers.values()))
    return {"files": files, "flags": entry.flags, "settings": settings, **verify(folder, target)}


def flipped_bank() -> dict[str, Any]:
    """The same record against a folder of which one byte was flipped."""
    source, folder = contract.folder_of("awq", "awq-half2", True)
    target, copy = WORK / "recorded-bank", WORK / "flipped-bank"
    with flags(FLAGS["awq-half2"]):
        record(source, target, "awq")
    shutil.copytree(folder, copy)
    bank = copy / "sm70" / f"tp{TP}" / "rank1" / "layer-00001.safetensors"
    data = bytearray(bank.read_bytes())
    data[-3] ^= 0x10
    bank.write_bytes(data)
    return verify(copy, target)


def sha256() -> dict[str, Any]:
    """A record in SHA-256, against a folder in BLAKE3 and one in SHA-256."""
    source, folder = contract.folder_of("awq", "awq-half2", True)
    target, same = WORK / "recorded-sha256", WORK / "sha256"
    with flags(FLAGS["awq-half2"]):
        record(source, target, "awq", extra={"record_hash": "sha256"})
    options = ["--tp-size", str(TP), "--layout", "awq-half2", "--hash", "sha256", "-q"]
    assert CliRunner().invoke(main, [str(source), "--out", str(same), *options]).exit_code == 0
    return {"other": verify(folder, target), "same": verify(same, target)}


def full(layout: str, interleave: bool) -> dict[str, Any]:
    """One full-size layer, for what the runtime does for that shape alone: its digests against the fast kernel's banks."""
    with flags(FLAGS[layout] | {FUSED: "1" if interleave else "0"}):
        layer = contract.new_layer("model.layers.7.mlp.experts", FULL, 1, 4)
        own = contract.new_method(OWN["nvfp4"], "nvfp4", layer)
        contract.create(own, layer, FULL, 4)
        for name, tensor in contract.full_sources().items():
            layer._parameters[name].data.copy_(tensor)
        own.process_weights_after_loading(layer)
        found: Record = record_of(contract.TinyModel({7: layer}), "blake3")
        entry = found.layers[7]
        assert recorded_layer(layer, 7, "blake3") == entry
    wanted = {name: digest_of(tensor, "blake3") for name, tensor in contract.full_banks(layout, interleave).items()}
    return {
        "rank": found.rank,
        "tp_size": found.tp_size,
        "layout": entry.layout,
        "interleave": entry.interleave_gate_up,
        "flags": entry.flags,
        "equal": sum(entry.tensors[name] == digest for name, digest in wanted.items()),
        "tensors": sorted(entry.tensors),
    }


def stopped(**change: Any) -> dict[str, Any]:
    source, folder = contract.folder_of("awq", "awq-half2", True)
    target = WORK / "nowhere"
    with flags({COMPACT: "0"}):
        result = contract.stops(
            lambda: record(folder if change.pop("prepared", False) else source, target, "awq", **change)
        )
    return {**result, "written": target.exists() and any(target.iterdir())}


def drafter() -> dict[str, Any]:
    source, _ = contract.folder_of("awq", "awq-half2", True)
    target = WORK / "drafter"
    with flags({COMPACT: "0"}):
        record(source, target, "awq", runner_type="draft")
    return {"files": [p.name for p in target.iterdir()]}


def no_banks() -> dict[str, Any]:
    layer = contract.new_layer("model.layers.0.mlp.experts", SMALL, 0, TP)
    return contract.stops(lambda: record_of(contract.TinyModel({0: layer}), "blake3"))


def unknown_layout() -> dict[str, Any]:
    layer = contract.new_layer("model.layers.0.mlp.experts", SMALL, 0, TP)
    for matrix in ("w13", "w2"):
        setattr(layer, f"{matrix}_tm_weight", torch.zeros(2, 8, 8, dtype=torch.uint8))
        setattr(layer, f"{matrix}_tm_scales", torch.zeros(2, 1, 8, dtype=torch.float16))
    return contract.stops(lambda: record_of(contract.TinyModel({0: layer}), "blake3"))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"record-{layout}-{'on' if i else 'off'}": lambda layout=layout, i=i: recorded("awq", layout, i)  # type: ignore[misc]
        for layout in ("awq-half2", "awq-compact", "awq-int4zero")
        for i in (True, False)
    },
    "record-nvfp4-fp16-off": lambda: recorded("nvfp4", "nvfp4-fp16", False),
    "full-nvfp4-fp16-on": lambda: full("nvfp4-fp16", True),
    "full-nvfp4-raw-on": lambda: full("nvfp4-raw", True),
    "stages": lambda: recorded("awq", "awq-half2", True, stages=2),
    "sha256": sha256,
    "flipped-qweight": lambda: recorded("awq", "awq-half2", True, flipped="down.qweight"),
    "flipped-scale": lambda: recorded("nvfp4", "nvfp4-fp16", False, flipped="up.weight_scale"),
    "flipped-bank": flipped_bank,
    "drafter": drafter,
    "stop-prepared": lambda: stopped(prepared=True),
    "stop-experts": lambda: stopped(use_ep=True),
    "stop-no-folder": lambda: stopped(extra={"record_hashes": ""}),
    "stop-hash": lambda: stopped(extra={"record_hash": "md5"}),
    "stop-no-banks": no_banks,
    "stop-unknown": unknown_layout,
}

if __name__ == "__main__":
    contract.run(CASES)
