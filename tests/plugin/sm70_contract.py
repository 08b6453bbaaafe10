"""Runs in a V100 runtime's environment: its own conversion after loading against the replay over banks. Writes report.json.

PYTHONPATH=<runtime>:... python sm70_contract.py WORK CASE ...
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    import revolta_stubs as stubs

    stubs.install()
    import vllm.model_executor.layers.quantization.awq_sm70_moe as awq_module
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import MoEActivation, RoutedExperts
except ImportError as exc:
    sys.stdout.write(f"{type(exc).__name__}: {exc}")
    sys.exit(77)
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor, nn

from sm70_convert.cli import main
from sm70_convert.errors import Sm70Error
from sm70_convert.layout import Layout, MoeShape
from sm70_convert.vllm_plugin import compat, loader, method
from sm70_convert.vllm_plugin.folder import LoadReport, PreparedFolder, loading
from synthetic import Synthetic, write_checkpoint

nvfp4_module = compat.quantization_module("nvfp4_sm70_moe")
SMALL = {"layers": 2, "experts": 4, "hidden": 128, "intermediate": 128, "top_k": 2, "vocab": 128, "shards": 2}
TP = 2
INTERLEAVE = "VLLM_SM70_AWQ_MOE_BATCHED_GEMM"
COMPACT, INT4_ZERO = "VLLM_SM70_AWQ_MOE_COMPACT_METADATA", "VLLM_SM70_AWQ_MOE_INT4_ZERO"
RAW, FUSED = "VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE", "VLLM_SM70_NVFP4_QWEN38_MOE_FUSED_SWIGLU_PREFILL"
FLAGS = {
    "awq-half2": {COMPACT: "0"},
    "awq-compact": {COMPACT: "1"},
    "awq-int4zero": {COMPACT: "1", INT4_ZERO: "1"},
    "nvfp4-fp16": {RAW: "0"},
    "nvfp4-raw": {RAW: "1"},
}
WORK = Path(sys.argv[1])
# The runtimes' own methods, before the plugin puts its subclasses there.
OWN = {"awq": awq_module.AWQSM70MoEMethod}
if nvfp4_module is not None:
    OWN["nvfp4"] = nvfp4_module.ModelOptNvFp4SM70MoEMethod
    nvfp4_module._SUPPORTED_CONTRACTS.add((128, 128, 4, 2))


METHODS_OF = {
    "awq": (awq_module, "AWQSM70MoEMethod"),
    "nvfp4": (nvfp4_module, "ModelOptNvFp4SM70MoEMethod"),
}


@contextmanager
def flags(values: Mapping[str, str]) -> Iterator[None]:
    """Environment settings, as a user would set them."""
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@contextmanager
def small_compact_shape() -> Iterator[None]:
    """Moves the shape for which the runtime takes compact AWQ scales to the small one."""
    names = ("_QWEN38_TP4_NUM_EXPERTS", "_QWEN38_TP4_W13_QWEIGHT_SHAPE", "_QWEN38_TP4_W2_QWEIGHT_SHAPE")
    saved = [getattr(awq_module, n, None) for n in names]
    for name, value in zip(names, (4, (128, 128 // 8), (64, 128 // 8)), strict=True):
        setattr(awq_module, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, saved, strict=True):
            setattr(awq_module, name, value)


def folder_of(format_: str, layout: str, interleave: bool) -> tuple[Path, Path]:
    """A small checkpoint and its prepared folder, made once."""
    source, out = WORK / format_, WORK / f"{layout}-{interleave}"
    if not source.exists():
        write_checkpoint(source, Synthetic(format=format_, group_size=32, like_globals=True, **SMALL))
    if not out.exists():
        options = ["--tp-size", str(TP), "--layout", layout, "--interleave", "on" if interleave else "off"]
        result = CliRunner().invoke(main, [str(source), "--out", str(out), *options, "-q"])
        assert result.exit_code == 0, result.output
    return source, out


def new_layer(name: str, shape: Mapping[str, int], rank: int, tp_size: int) -> Any:
    """A layer of routed experts with what the runtimes' methods look at, and no distributed state."""
    stubs.place(rank, tp_size)
    layer = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(layer)
    parallel = SimpleNamespace(
        tp_rank=rank, tp_size=tp_size, use_ep=False, use_all2all_kernels=False, enable_eplb=False
    )
    layer.layer_name = name
    layer.moe_config = SimpleNamespace(
        tp_size=tp_size,
        tp_rank=rank,
        experts_per_token=shape["top_k"],
        has_bias=False,
        is_act_and_mul=True,
        hidden_dim=shape["hidden"],
        num_experts=shape["experts"],
        intermediate_size_per_partition=shape["intermediate"] // tp_size,
        moe_parallel_config=parallel,
        moe_backend="auto",
    )
    layer.activation = MoEActivation.SILU
    layer.apply_router_weight_on_input = False
    layer.register_buffer("_expert_map", None)
    layer.rocm_aiter_fmoe_enabled = False
    layer.local_num_experts = layer.global_num_experts = shape["experts"]
    layer.swiglu_limit = None
    return layer


def new_method(cls: type[Any], format_: str, layer: Any) -> Any:
    if format_ == "awq":
        return cls(4, 32, True, layer)
    config = SimpleNamespace(quant_method="NVFP4", is_checkpoint_nvfp4_serialized=True, group_size=16)
    return cls(config, layer.moe_config)


def create(method_: Any, layer: Any, shape: Mapping[str, int], tp_size: int) -> None:
    layer.quant_method = layer.base_quant_method = method_
    method_.create_weights(
        layer=layer,
        num_experts=shape["experts"],
        hidden_size=shape["hidden"],
        intermediate_size_per_partition=shape["intermediate"] // tp_size,
        params_dtype=torch.float16,
        weight_loader=None,
        global_num_experts=shape["experts"],
    )


def load_sources(layer: Any, source: Path, number: int, rank: int, tp_size: int) -> None:
    """Fills the runtime's source parameters from a checkpoint, cut for the rank."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
    suffixes = {n.removeprefix("w13_") for n in layer._parameters if n.startswith("w13_")} - {"input_scale"}
    for e in range(SMALL["experts"]):
        prefix = f"model.layers.{number}.mlp.experts.{e}."
        for suffix in suffixes:
            gate, up, down = (tensors[f"{prefix}{p}_proj.{suffix}"] for p in ("gate", "up", "down"))
            if gate.dim() == 0:
                layer._parameters[f"w13_{suffix}"].data[e] = torch.stack([gate, up])
                layer._parameters[f"w2_{suffix}"].data[e] = down
                continue
            # AWQ holds [K, N], NVFP4 [N, K].
            out = 1 if "q" in "".join(suffixes) else 0
            cut = [t.chunk(tp_size, dim=d)[rank] for t, d in ((gate, out), (up, out), (down, 1 - out))]
            layer._parameters[f"w13_{suffix}"].data[e] = torch.cat(cut[:2], dim=out)
            layer._parameters[f"w2_{suffix}"].data[e] = cut[2]


def compare(normal: Any, replayed: Any) -> int:
    """Holds two layers equal in every parameter, buffer and attribute; gives the number of items."""
    skipped = {"quant_method", "base_quant_method", "moe_config", "_parameters", "_buffers", "_modules"}
    compared = 0
    for kind in ("_parameters", "_buffers"):
        a, b = getattr(normal, kind), getattr(replayed, kind)
        assert set(a) == set(b), (kind, sorted(set(a) ^ set(b)))
        for name in a:
            same(name, a[name], b[name])
            compared += 1
    a, b = ({k: v for k, v in vars(m).items() if k not in skipped} for m in (normal, replayed))
    assert set(a) == set(b), sorted(set(a) ^ set(b))
    for name in a:
        if not name.endswith("_hooks") and not name.endswith("hooks_with_kwargs"):
            same(name, a[name], b[name])
            compared += 1
    return compared


def same(name: str, a: Any, b: Any) -> None:
    assert type(a) is type(b), (name, type(a), type(b))
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device), name
        assert a.requires_grad == b.requires_grad, name
        x, y = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(x, y), f"{name} differs in {int((x != y).sum())} bytes"
    else:
        assert a == b, (name, a, b)


def small_case(format_: str, layout: str, interleave: bool) -> dict[str, Any]:
    """The runtime's own path on a small layer against the replay, on every rank and layer."""
    source, out = folder_of(format_, layout, interleave)
    folder = PreparedFolder.open(out, verify=True)
    assert folder is not None
    settings = FLAGS[layout] | {INTERLEAVE: "1" if interleave else "0"}
    compared = real = 0
    with flags(settings), small_compact_shape():
        for number in range(SMALL["layers"]):
            for rank in range(TP):
                name = f"model.layers.{number}.mlp.experts"
                normal = new_layer(name, SMALL, rank, TP)
                own = new_method(OWN[format_], format_, normal)
                create(own, normal, SMALL, TP)
                load_sources(normal, source, number, rank, TP)
                stubs.CALLS.clear()
                own.process_weights_after_loading(normal)
                assert prepared_calls() == 2 * SMALL["experts"]

                replayed = new_layer(name, SMALL, rank, TP)
                pointers = fill_and_replay(folder, format_, replayed, number, rank, SMALL, TP)
                real += prepared_calls()
                compared += compare(normal, replayed)
                assert len(pointers) == len(folder.tensor_names)
    return {"compared": compared // (SMALL["layers"] * TP), "prepared_for_real": real}


def fill_and_replay(
    folder: PreparedFolder, format_: str, layer: Any, number: int, rank: int, shape: Mapping[str, int], tp_size: int
) -> dict[str, int]:
    """Loads a bank and replays; the bank must stay where it was, and the pointer tables must be built over it."""
    ours = new_method(method.takes_banks(OWN[format_]), format_, layer)
    with loading(folder):
        create(ours, layer, shape, tp_size)
    assert set(layer._parameters) == set(folder.tensor_names)
    before = {n: p.untyped_storage().data_ptr() for n, p in loader.bank_parameters(folder, layer).items()}
    folder.fill(loader.bank_parameters(folder, layer), number, rank, tp_size)
    stubs.CALLS.clear()
    stubs.POINTERS.clear()
    ours.process_weights_after_loading(layer)
    after = {n: layer._parameters[n].untyped_storage().data_ptr() for n in before}
    assert after == before, "a bank was copied"
    assert {w for w, _ in stubs.POINTERS} == {before["w13_tm_weight"], before["w2_tm_weight"]}
    assert ours.sources == {}
    return before


def prepared_calls() -> int:
    return sum(count for name, count in stubs.CALLS.items() if "_prepare" in name)


class MemoryFolder(PreparedFolder):
    """Banks of one full-size layer, held in memory: 512 experts, of which the first few are unlike."""

    def __init__(self, layout: Layout, shape: Mapping[str, int], banks: Mapping[str, Tensor]) -> None:
        self.layout, self.banks = layout, banks
        self.moe = MoeShape((0,), shape["experts"], shape["hidden"], shape["intermediate"], shape["top_k"])
        self.checkpoint_group_size, self.report = 16, LoadReport()
        self.manifest = SimpleNamespace(tp_sizes=(4,), layers={0: None})  # type: ignore[assignment]

    def fill(self, parameters: Mapping[str, Tensor], layer: int, *_: int) -> int:
        assert set(parameters) == set(self.banks)
        for name, tensor in self.banks.items():
            assert (parameters[name].dtype, parameters[name].shape) == (tensor.dtype, tensor.shape), name
            parameters[name].data.copy_(tensor)
        self.report.layers.add(layer)
        return 0


FULL = {"experts": 512, "hidden": 2560, "intermediate": 640, "top_k": 10}
_full: dict[str, Any] = {}


def full_sources() -> dict[str, Tensor]:
    """NVFP4 sources of one rank in the one shape that gets raw scales and interleaving; seven unlike experts, repeated."""
    if not _full:
        generator = torch.Generator().manual_seed(38)
        unlike, local, hidden = 7, 160, FULL["hidden"]
        pick = torch.arange(FULL["experts"]) % unlike

        def bytes_(*size: int) -> Tensor:
            return torch.randint(0, 256, (unlike, *size), dtype=torch.uint8, generator=generator)[pick]

        def codes(*size: int) -> Tensor:
            # 2^-3 to 2^8: exact as raw codes.
            values = torch.randint(0x20, 0x78, (unlike, *size), dtype=torch.uint8, generator=generator)
            return values.view(torch.float8_e4m3fn)[pick]

        scale = torch.tensor([2.0**-9 * (1 + i / 16) for i in range(unlike)])[pick]
        _full.update(
            w13_weight=bytes_(2 * local, hidden // 2),
            w2_weight=bytes_(hidden, local // 2),
            w13_weight_scale=codes(2 * local, hidden // 16),
            w2_weight_scale=codes(hidden, local // 16),
            w13_weight_scale_2=torch.stack([scale, scale], dim=1),
            w2_weight_scale_2=scale * 1.25,
        )
    return _full


def full_banks(layout: str, interleave: bool) -> dict[str, Tensor]:
    """The banks of those sources by the fast kernel: seven experts prepared, then repeated."""
    import numpy as np

    from sm70_kernels.numpy_sm70 import NumpyKernel
    from sm70_kernels.spec import Projection

    sources, moe = full_sources(), MoeShape((0,), 7, FULL["hidden"], 160, 10)
    from sm70_convert.layout import bank_tensors

    kinds = {"I32": (np.uint32, torch.int32), "F16": (np.uint16, torch.float16), "U8": (np.uint8, torch.uint8)}
    kinds["F32"] = (np.float32, torch.float32)
    spec = bank_tensors(Layout(layout, interleave, 16), moe, 1)
    out = {t.name: np.zeros((7, 1, *t.shape), kinds[t.dtype][0]) for t in spec}
    kernel = NumpyKernel()
    for e in range(7):

        def part(name: str, rows: slice, which: int | None, e: int = e) -> Projection:
            scale = sources[f"{name}_weight_scale_2"][e]
            return Projection(
                sources[f"{name}_weight"][e, rows].numpy(),
                sources[f"{name}_weight_scale"][e, rows].view(torch.uint8).numpy(),
                None,
                np.float32(float(scale if which is None else scale[which])),
            )

        gate, up = part("w13", slice(0, 160), 0), part("w13", slice(160, 320), 1)
        down = part("w2", slice(None), None)
        kernel.prepare(gate, up, down, layout=layout, interleave=interleave, outs=[{n: a[e] for n, a in out.items()}])
    pick = torch.arange(FULL["experts"]) % 7
    signed = {np.uint32: np.int32, np.uint16: np.float16}
    return {
        t.name: torch.from_numpy(out[t.name][:, 0].view(signed.get(kinds[t.dtype][0], kinds[t.dtype][0])))[pick]
        for t in spec
    }


def full_case(layout: str, interleave: bool) -> dict[str, Any]:
    """The same at full size, for what the runtime does for that shape alone."""
    with flags(FLAGS[layout] | {FUSED: "1" if interleave else "0"}):
        normal = new_layer("model.layers.0.mlp.experts", FULL, 1, 4)
        own = new_method(OWN["nvfp4"], "nvfp4", normal)
        create(own, normal, FULL, 4)
        for name, tensor in full_sources().items():
            normal._parameters[name].data.copy_(tensor)
        stubs.CALLS.clear()
        own.process_weights_after_loading(normal)
        assert prepared_calls() == 2 * FULL["experts"]
        folder = MemoryFolder(Layout(layout, interleave, 16), FULL, full_banks(layout, interleave))
        replayed = new_layer("model.layers.0.mlp.experts", FULL, 1, 4)
        fill_and_replay(folder, "nvfp4", replayed, 0, 1, FULL, 4)
        real = prepared_calls()
        return {"compared": compare(normal, replayed), "prepared_for_real": real}


def stops(action: Callable[[], object]) -> dict[str, Any]:
    """What a mismatch says."""
    try:
        action()
    except Sm70Error as exc:
        return {"error": type(exc).__name__, "lines": exc.lines()}
    raise AssertionError("was not stopped")


def replay_against(layout: str, interleave: bool, settings: Mapping[str, str], format_: str = "awq") -> dict[str, Any]:
    """A small folder of one layout on a runtime that is set to another."""
    _, out = folder_of(format_, layout, interleave)
    folder = PreparedFolder.open(out)
    assert folder is not None
    layer = new_layer("model.layers.1.mlp.experts", SMALL, 0, TP)
    with flags(settings), small_compact_shape():
        result = stops(lambda: fill_and_replay(folder, format_, layer, 1, 0, SMALL, TP))
    result["prepared_for_real"] = prepared_calls()
    return result


def full_against(layout: str, interleave: bool, settings: Mapping[str, str]) -> dict[str, Any]:
    folder = MemoryFolder(Layout(layout, interleave, 16), FULL, full_banks(layout, interleave))
    layer = new_layer("model.layers.0.mlp.experts", FULL, 0, 4)
    with flags(settings):
        return stops(lambda: fill_and_replay(folder, "nvfp4", layer, 0, 0, FULL, 4))


def creating(**change: Any) -> dict[str, Any]:
    """A mismatch that is found when the layer is built."""
    _, out = folder_of("awq", "awq-half2", True)
    folder = PreparedFolder.open(out)
    assert folder is not None
    shape = SMALL | change.get("shape", {})
    tp_size = change.get("tp_size", TP)
    layer = new_layer("model.layers.0.mlp.experts", shape, 0, tp_size)
    layer.moe_config.moe_parallel_config.use_ep = change.get("use_ep", False)
    ours = new_method(method.takes_banks(OWN["awq"]), "awq", layer)
    with loading(folder):
        return stops(lambda: create(ours, layer, shape, tp_size))


def not_filled() -> dict[str, Any]:
    _, out = folder_of("awq", "awq-half2", True)
    folder = PreparedFolder.open(out)
    layer = new_layer("model.layers.0.mlp.experts", SMALL, 0, TP)
    ours = new_method(method.takes_banks(OWN["awq"]), "awq", layer)
    with loading(folder):
        create(ours, layer, SMALL, TP)
    return stops(lambda: ours.process_weights_after_loading(layer))


def without_bank() -> dict[str, Any]:
    """A drafter's experts, and a checkpoint that is not prepared, are the runtime's own affair."""
    source, out = folder_of("awq", "awq-half2", True)
    done = 0
    for name, folder in (("mtp.layers.0.mlp.experts", PreparedFolder.open(out)), ("model.layers.0.mlp.experts", None)):
        layer = new_layer(name, SMALL, 0, TP)
        ours = new_method(method.takes_banks(OWN["awq"]), "awq", layer)
        with loading(folder):
            create(ours, layer, SMALL, TP)
        load_sources(layer, source, 0, 0, TP)
        stubs.CALLS.clear()
        ours.process_weights_after_loading(layer)
        assert prepared_calls() == 2 * SMALL["experts"]
        done += 1
    return {"layers": done}


class TinyModel(nn.Module):
    """What a loader sees of a model: experts layers, and weights that it takes one by one."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): layer for n, layer in layers.items()})
        self.seen: list[str] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.seen = [name for name, _ in weights]
        return set(self.seen)


def whole_load(load_format: str, extra: Mapping[str, Any], format_: str = "awq", **change: Any) -> dict[str, Any]:
    """The runtime's real loader over a folder: registry, create_weights, its own streaming, banks, its own post-load code."""
    import vllm.model_executor.model_loader.base_loader as base
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    layout = "awq-half2" if format_ == "awq" else "nvfp4-fp16"
    _, out = folder_of(format_, layout, format_ == "awq")
    out = change.get("folder", out)
    loader.register()
    loader.register()
    method.register()
    method.register()
    rank = 1
    model_config = SimpleNamespace(
        model=str(out),
        revision=None,
        quantization=change.get("quantization", format_),
        runner_type=change.get("runner_type", "generate"),
        dtype=torch.float16,
        is_moe=True,
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(),
        get_layers_start_end_indices=lambda _: change.get("stage", (0, SMALL["layers"])),
    )
    config = VllmConfig()
    vllm_config = SimpleNamespace(
        model_config=model_config,
        parallel_config=config.parallel_config,
        load_config=SimpleNamespace(device=None),
        device_config=SimpleNamespace(device="cpu"),
        quant_config=None,
    )

    def build(**_: Any) -> nn.Module:
        layers = {}
        for number in change.get("built", range(SMALL["layers"])):
            name = f"{change.get('prefix', 'model')}.layers.{number}.mlp.experts"
            layer = new_layer(name, SMALL, rank, TP)
            module, name = METHODS_OF[format_]
            cls = change.get("method", getattr(module, name))
            create(new_method(cls, format_, layer), layer, SMALL, TP)
            layers[number] = layer
        return TinyModel(layers)

    base.initialize_model = build
    base.log_model_inspection = lambda _: None
    loaded = get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=dict(extra)))
    if change.get("other_loader"):
        loaded = compat.DefaultModelLoader(loaded.load_config)
        object.__setattr__(config, "model_config", model_config)
    with set_current_vllm_config(config), flags({COMPACT: "0"} | change.get("flags", {})):
        stubs.CALLS.clear()
        model = loaded.load_model(vllm_config, model_config)
    first = next(iter(model.layers.values()))
    banks = [p for p in first._parameters if p in ("w13_tm_weight", "w13_tm_scales", "w2_tm_weight", "w2_tm_scales")]
    return {
        "is_default_loader": isinstance(loaded, compat.DefaultModelLoader),
        "index": sorted(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]),
        "seen": model.seen,
        "banks": banks,
        "prepared_for_real": prepared_calls(),
    }


class Skinny(OWN.get("nvfp4", nn.Module)):  # type: ignore[misc]
    """As ReVolta's own choice for small batches: another backend, which keeps the sources."""

    nvfp4_backend = SimpleNamespace(name="SM70_SKINNY")


def broken_load(break_: Callable[[Path], object], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A load of a damaged copy; gives what vLLM would show of the error."""
    import shutil

    _, whole = folder_of("awq", "awq-half2", True)
    out = WORK / "broken"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(whole, out)
    break_(out)
    try:
        whole_load("sm70_prepared", extra, folder=out)
    except Sm70Error as exc:
        return {"error": type(exc).__name__, "text": str(exc)}
    raise AssertionError("was not stopped")


BANK = "sm70/tp2/rank1/layer-00001.safetensors"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"replay-{layout}-{'on' if i else 'off'}": lambda layout=layout, i=i: small_case("awq", layout, i)  # type: ignore[misc]
        for layout in ("awq-half2", "awq-compact", "awq-int4zero")
        for i in (True, False)
    },
    "replay-nvfp4-fp16-off": lambda: small_case("nvfp4", "nvfp4-fp16", False),
    "replay-nvfp4-fp16-on": lambda: full_case("nvfp4-fp16", True),
    "replay-nvfp4-raw-on": lambda: full_case("nvfp4-raw", True),
    "replay-nvfp4-raw-off": lambda: full_case("nvfp4-raw", False),
    "stop-interleaved": lambda: replay_against("awq-half2", True, {COMPACT: "0", INTERLEAVE: "0"}),
    "stop-not-interleaved": lambda: replay_against("awq-half2", False, {COMPACT: "0"}),
    "stop-half2-for-compact": lambda: replay_against("awq-half2", True, {COMPACT: "1"}),
    "stop-half2-for-int4zero": lambda: replay_against("awq-half2", True, {COMPACT: "1", INT4_ZERO: "1"}),
    "stop-compact-for-half2": lambda: replay_against("awq-compact", True, {COMPACT: "0"}),
    "stop-int4zero-for-compact": lambda: replay_against("awq-int4zero", True, {COMPACT: "1", INT4_ZERO: "0"}),
    "stop-nvfp4-interleaved": lambda: replay_against("nvfp4-fp16", True, {RAW: "0"}, "nvfp4"),
    "stop-fp16-for-raw": lambda: full_against("nvfp4-fp16", True, {RAW: "1"}),
    "stop-raw-for-fp16": lambda: full_against("nvfp4-raw", True, {RAW: "0"}),
    "stop-tp": lambda: creating(tp_size=4),
    "stop-ep": lambda: creating(use_ep=True),
    "stop-shape": lambda: creating(shape={"hidden": 256}),
    "stop-experts": lambda: creating(shape={"experts": 8}),
    "stop-not-filled": not_filled,
    "without-bank": without_bank,
    "load-sm70_prepared": lambda: whole_load("sm70_prepared", {"verify": True}),
    "load-auto": lambda: whole_load("auto", {}),
    "load-safetensors": lambda: whole_load("safetensors", {}),
    "load-nvfp4": lambda: whole_load("sm70_prepared", {}, "nvfp4"),
    "load-stage": lambda: whole_load("sm70_prepared", {}, stage=(1, 2), built=[1]),
    "load-missing-layer": lambda: stops(lambda: whole_load("sm70_prepared", {}, built=[0])),
    "load-skinny": lambda: stops(lambda: whole_load("auto", {}, "nvfp4", method=Skinny)),
    "load-drafter": lambda: whole_load("auto", {}, runner_type="draft", prefix="mtp", built=[0], quantization=None),
    "load-plain": lambda: whole_load("auto", {}, folder=WORK / "awq", quantization=None),
    "load-plain-strict": lambda: stops(lambda: whole_load("sm70_prepared", {}, folder=WORK / "awq")),
    "load-plain-verify": lambda: stops(lambda: whole_load("auto", {"verify": True}, folder=WORK / "awq")),
    "load-elsewhere": lambda: stops(lambda: whole_load("sm70_prepared", {}, folder=WORK / "org" / "name")),
    "load-other-loader": lambda: stops(lambda: whole_load("auto", {}, other_loader=True)),
    "load-truncated": lambda: broken_load(lambda d: os.truncate(d / BANK, (d / BANK).stat().st_size - 4), {}),
    "load-missing": lambda: broken_load(lambda d: (d / BANK).unlink(), {}),
    "load-altered": lambda: broken_load(lambda d: flip(d / BANK), {"verify": True}),
    "load-unsealed": lambda: broken_load(lambda d: (d / "sm70/manifest.json").unlink(), {}),
}


def outcome(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case gives, or how it failed."""
    try:
        return case()
    except Exception:  # noqa: BLE001 - reported to the test
        return {"traceback": traceback.format_exc()[-3000:]}


def run(cases: Mapping[str, Callable[[], dict[str, Any]]] = CASES) -> None:
    """Each case by itself; one that fails does not stop the others."""
    # Memory from torch.empty is filled, so that buffers without contents compare too.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    report = {case: outcome(cases[case]) for case in sys.argv[2:] or cases}
    (WORK / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    run()
