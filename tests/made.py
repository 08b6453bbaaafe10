"""Tiny AWQ and NVFP4 MoE checkpoints made by code, and wrong on purpose where a test wants that.

Nothing of the tool is used here: the files are written by a few lines of this module's own, which check nothing.
"""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import ArrayLike

ITEM_SIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROJECTIONS = ("gate", "up", "down")
EXPERTS = "model.layers.0.mlp.experts"  # where most tests look
LEFT_OUT = "tensors that the banks do not need are left out"  # a finding of every layer with input_scale


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def tensor(dtype: str, shape: tuple[int, ...], data: bytes = b"\1") -> Tensor:
    """A tensor of `data`, repeated or cut to the size that dtype and shape take."""
    size = prod(shape) * ITEM_SIZE[dtype]
    return Tensor(dtype, shape, (data * (size // len(data) + 1))[:size])


def bf16(values: ArrayLike) -> bytes:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def f16(values: ArrayLike) -> bytes:
    return np.asarray(values, np.float16).tobytes()


def f32(values: ArrayLike) -> bytes:
    return np.asarray(values, np.float32).tobytes()


@dataclass
class Made:
    """A checkpoint not yet written: shards by file name, config.json, and other files by name."""

    config: dict[str, Any]
    shards: dict[str, dict[str, Tensor]]
    index: bool = False
    others: dict[str, bytes] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for shard in self.shards.values() for name, tensor in shard.items()}

    @property
    def quantization(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def _holder(self, name: str) -> dict[str, Tensor]:
        return next(shard for shard in self.shards.values() if name in shard)

    def drop(self, *names: str) -> None:
        for name in names:
            del self._holder(name)[name]

    def drop_expert(self, expert: int, layer: int = 0) -> None:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        self.drop(*(name for name in self.tensors if name.startswith(prefix)))

    def add(self, name: str, new: Tensor, file: str | None = None) -> None:
        self.shards.setdefault(file or next(iter(self.shards)), {})[name] = new

    def change(
        self, name: str, *, dtype: str | None = None, shape: tuple[int, ...] | None = None, data: bytes | None = None
    ) -> None:
        """Other dtype, shape or bytes; the bytes always fill the tensor."""
        old = self.tensors[name]
        self._holder(name)[name] = tensor(dtype or old.dtype, old.shape if shape is None else shape, data or old.data)

    def set_item(self, name: str, position: int, item: bytes) -> None:
        """Replaces one element by its bytes."""
        data = bytearray(self.tensors[name].data)
        data[position * len(item) : (position + 1) * len(item)] = item
        self.change(name, data=bytes(data))

    def rename(self, old: str, new: str) -> None:
        """Replaces `old` in every tensor's name."""
        for file, shard in self.shards.items():
            self.shards[file] = {name.replace(old, new): tensor for name, tensor in shard.items()}

    def unquantise(self, module: str) -> None:
        """Gives a projection a bf16 weight in place of its quantised parts."""
        parts = [name for name in self.tensors if name.startswith(f"{module}.")]
        shard = self._holder(parts[0])
        hidden, intermediate = self.config["hidden_size"], self.config["moe_intermediate_size"]
        shape = (hidden, intermediate) if module.endswith("down_proj") else (intermediate, hidden)
        self.drop(*parts)
        shard[f"{module}.weight"] = tensor("BF16", shape, bf16([0.01, -0.02]))

    def write(self, folder: Path) -> Path:
        """Writes everything into the new `folder`, which it returns."""
        folder.mkdir(parents=True)
        for name, shard in self.shards.items():
            write_file(folder / name, shard)
        if self.index:
            weight_map = {name: file for file, shard in self.shards.items() for name in shard}
            total = sum(len(t.data) for t in self.tensors.values())
            document = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(document, indent=2))
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        for name, data in self.others.items():
            (folder / name).write_bytes(data)
        return folder


def write_file(path: Path, tensors: Mapping[str, Tensor], *, header_bytes: int | None = None) -> None:
    """One safetensors file, in the order given; with header_bytes, its header is padded to exactly that size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}} if tensors else {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    header = json.dumps(entries).encode()
    header = header.ljust(header_bytes or -(-len(header) // 8) * 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(t.data for t in tensors.values()))


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """A JSON file as a document, written back after the block."""
    document = json.loads(path.read_bytes())
    yield document
    path.write_text(json.dumps(document))


def awq(
    *,
    layers: int = 1,
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 64,
    group_size: int = 32,
    shards: int = 1,
) -> Made:
    """An AWQ checkpoint of AutoAWQ's kind. With two shards, the second has the upper half of the experts of each layer."""
    quantization = {"bits": 4, "group_size": group_size, "modules_to_not_convert": ["mlp.gate"], "quant_method": "awq",
                    "version": "gemm", "zero_point": True}  # fmt: skip
    return _made(quantization, layers, experts, hidden, intermediate, group_size, shards)


def nvfp4(
    *, layers: int = 1, experts: int = 4, hidden: int = 64, intermediate: int = 64, shards: int = 1, w4a4: bool = True
) -> Made:
    """An NVFP4 checkpoint of ModelOpt's kind. Gate and up of an expert have the same global scale."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.embed_tokens", *(f"model.layers.{layer}.mlp.gate" for layer in range(layers))],
        "quant_algo": "NVFP4" if w4a4 else "W4A16_NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }
    return _made(quantization, layers, experts, hidden, intermediate, None, shards)


def _made(
    quantization: dict[str, Any],
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    group_size: int | None,
    shards: int,
) -> Made:
    files = [SINGLE] if shards == 1 else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    made = Made(
        config={
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": hidden,
            "model_type": "qwen3_moe",
            "moe_intermediate_size": intermediate,
            "num_experts": experts,
            "num_experts_per_tok": min(2, experts),
            "num_hidden_layers": layers,
            "rms_norm_eps": 1e-06,
            "torch_dtype": "bfloat16",
            "quantization_config": quantization,
            "vocab_size": 8,
        },
        shards={file: {} for file in files},
        index=shards > 1,
        others={"generation_config.json": b'{"do_sample": true}\n', "tokenizer.json": b'{"version": "1.0"}'},
    )
    made.add("model.embed_tokens.weight", tensor("BF16", (8, hidden), bf16([0.5, -0.25, 0.125])))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        made.add(f"{prefix}input_layernorm.weight", tensor("BF16", (hidden,), bf16([1.0])))
        made.add(f"{prefix}mlp.gate.weight", tensor("BF16", (experts, hidden), bf16([0.75, -0.5])))
        for expert in range(experts):
            file = files[expert * shards // experts]
            for name, new in expert_tensors(f"{prefix}mlp.experts.{expert}.", hidden, intermediate, group_size).items():
                if not name.endswith("input_scale") or quantization.get("quant_algo") == "NVFP4":
                    made.add(name, new, file)
    made.add("model.norm.weight", tensor("BF16", (hidden,), bf16([1.5])), files[-1])
    return made


def expert_tensors(prefix: str, hidden: int, intermediate: int, group_size: int | None) -> dict[str, Tensor]:
    """Gate, up and down under `prefix`: AWQ of this group size, or NVFP4 if it is None. The name decides the values."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(prefix.encode())))
    global_scale = rng.uniform(1e-4, 5e-4)  # gate and up share it
    made = {}
    for projection in PROJECTIONS:
        k, n = (intermediate, hidden) if projection == "down" else (hidden, intermediate)
        name = f"{prefix}{projection}_proj"
        if group_size is None:
            made[f"{name}.weight"] = Tensor("U8", (n, k // 2), rng.bytes(n * k // 2))
            codes = rng.integers(0x30, 0x7E, n * (k // 16), np.uint8)
            made[f"{name}.weight_scale"] = Tensor("F8_E4M3", (n, k // 16), codes.tobytes())
            made[f"{name}.weight_scale_2"] = Tensor("F32", (), f32(global_scale))
            made[f"{name}.input_scale"] = Tensor("F32", (), f32(0.25))
        else:
            groups = k // group_size
            made[f"{name}.qweight"] = Tensor("I32", (k, n // 8), rng.bytes(k * n // 2))
            made[f"{name}.qzeros"] = Tensor("I32", (groups, n // 8), rng.bytes(groups * n // 2))
            made[f"{name}.scales"] = Tensor("F16", (groups, n), f16(rng.uniform(0.001, 0.02, groups * n)))
    return made


def fuse(made: Made, suffixes: Mapping[str, str], *, globals_shape: str = "[E]") -> None:
    """Turns an NVFP4 checkpoint's experts into 3-D tensors of all of them, gate rows before up rows.

    suffixes: part -> what follows `gate_up_proj` and `down_proj` in the name. globals_shape: [E], [E, 1] or [E, 2] (gate, up).
    """
    experts = made.config["num_experts"]
    for layer in range(made.config["num_hidden_layers"]):
        module = f"model.layers.{layer}.mlp.experts"
        for part, suffix in suffixes.items():
            one = {
                (expert, projection): made.tensors[f"{module}.{expert}.{projection}_proj.{part}"]
                for expert in range(experts)
                for projection in PROJECTIONS
            }
            for name, targets in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                projections: tuple[str, ...] = targets
                first = one[0, projections[0]]
                if first.shape:
                    shape: tuple[int, ...] = (experts, len(projections) * first.shape[0], *first.shape[1:])
                else:
                    many = len(projections) if globals_shape == "[E, 2]" else 1
                    shape = (experts,) if globals_shape == "[E]" else (experts, many)
                    projections = projections[:many]
                data = b"".join(one[expert, projection].data for expert in range(experts) for projection in projections)
                made.add(f"{module}.{name}{suffix}", Tensor(first.dtype, shape, data))
        for expert in range(experts):
            made.drop_expert(expert, layer)
