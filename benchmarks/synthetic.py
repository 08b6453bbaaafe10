"""Synthetic MoE checkpoints of any size: files, names, dtypes and tensor order of a real one, random values.

    python benchmarks/synthetic.py OUT --format awq --layers 8 --experts 128 --hidden 2048 --intermediate 768

Shards are written as the safetensors library writes them, byte for byte, but streamed: memory stays small.
The same arguments give the same bytes, and a tensor's bytes depend on its shape, name and the seed alone.
Only its first values are drawn for it; the rest is one random block, rotated by an amount of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Format = Literal["awq", "nvfp4", "w4a16_nvfp4"]

# The safetensors library sorts by alignment, descending, then by its own dtype order, then by name.
DTYPE_ORDER = ("F32", "I32", "BF16", "F16", "F8_E4M3", "U8")
ITEM_SIZE = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
BLOCK_ITEMS = 1 << 20
HEAD_ITEMS = 1024
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32


@dataclass(frozen=True)
class Synthetic:
    """What to write. The first `first_dense` layers have a dense MLP, quantised like the experts.

    `like_globals` gives gate and up the same `weight_scale_2`; otherwise they differ.
    """

    format: Format = "awq"
    layers: int = 8
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    group_size: int = 64  # AWQ only; NVFP4 has 16
    shards: int = 4  # 1: one model.safetensors and no index, as exporters do
    seed: int = 0
    top_k: int = 8
    first_dense: int = 0
    shared_expert: bool = False
    like_globals: bool = False
    vocab: int = 1024


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


def write_checkpoint(folder: Path, spec: Synthetic) -> None:
    """Writes the whole checkpoint into `folder`, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    every = list(tensors(spec))
    total = sum(tensor.nbytes for tensor in every)
    shards: dict[int, list[Tensor]] = {}
    done = 0
    for tensor in every:  # cut by size alone, so that an expert may lie in two shards
        shards.setdefault(done * spec.shards // total, []).append(tensor)
        done += tensor.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    blocks = {dtype: draw(dtype, np.random.Generator(np.random.PCG64(spec.seed)), BLOCK_ITEMS) for dtype in DTYPE_ORDER}
    for name, content in zip(names, shards.values(), strict=True):
        _write_shard(folder / name, content, spec, blocks)
    if len(shards) > 1:
        pairs = zip(names, shards.values(), strict=True)
        weight_map = {tensor.name: name for name, content in pairs for tensor in content}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    for name, value in _small_files(spec).items():
        _write_json(folder / name, value)


def tensors(spec: Synthetic) -> Iterator[Tensor]:
    """Every tensor, in the order of the model's modules."""
    hidden, q, kv = spec.hidden, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield Tensor("model.embed_tokens.weight", "BF16", (spec.vocab, hidden))
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield Tensor(f"{prefix}self_attn.{name}_proj.weight", "BF16", shape)
        yield Tensor(f"{prefix}self_attn.q_norm.weight", "BF16", (HEAD_DIM,))
        yield Tensor(f"{prefix}self_attn.k_norm.weight", "BF16", (HEAD_DIM,))
        if layer < spec.first_dense:
            yield from _mlp(f"{prefix}mlp.", spec)
        else:
            yield Tensor(f"{prefix}mlp.gate.weight", "BF16", (spec.experts, hidden))
            for expert in range(spec.experts):
                yield from _mlp(f"{prefix}mlp.experts.{expert}.", spec)
            if spec.shared_expert:
                yield from _mlp(f"{prefix}mlp.shared_expert.", spec)
                yield Tensor(f"{prefix}mlp.shared_expert_gate.weight", "BF16", (1, hidden))
        yield Tensor(f"{prefix}input_layernorm.weight", "BF16", (hidden,))
        yield Tensor(f"{prefix}post_attention_layernorm.weight", "BF16", (hidden,))
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    yield Tensor("lm_head.weight", "BF16", (spec.vocab, hidden))


def _mlp(prefix: str, spec: Synthetic) -> Iterator[Tensor]:
    up, down = (spec.hidden, spec.intermediate), (spec.intermediate, spec.hidden)
    for name, (k, n) in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
        if spec.format == "awq":
            groups = k // spec.group_size
            yield Tensor(f"{prefix}{name}.qweight", "I32", (k, n // 8))
            yield Tensor(f"{prefix}{name}.qzeros", "I32", (groups, n // 8))
            yield Tensor(f"{prefix}{name}.scales", "F16", (groups, n))
        else:
            yield Tensor(f"{prefix}{name}.weight", "U8", (n, k // 2))
            yield Tensor(f"{prefix}{name}.weight_scale", "F8_E4M3", (n, k // 16))
            yield Tensor(f"{prefix}{name}.weight_scale_2", "F32", ())
            if spec.format == "nvfp4":
                yield Tensor(f"{prefix}{name}.input_scale", "F32", ())


def draw(dtype: str, rng: np.random.Generator, items: int) -> NDArray[np.uint8]:
    """Random values of one dtype as bytes; the dtype alone says what they stand for."""
    match dtype:
        case "F32":  # globals
            values: NDArray[Any] = rng.uniform(1e-4, 5e-4, items).astype(np.float32)
        case "BF16":  # weights that no format quantises
            values = (rng.normal(0, 0.02, items).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        case "F16":  # AWQ scales
            values = rng.uniform(0.001, 0.02, items).astype(np.float16)
        case "F8_E4M3":  # NVFP4 block scales, 0.5 to 448
            values = rng.integers(0x30, 0x7E, items, dtype=np.uint8, endpoint=True)
        case _:  # packed nibbles, any value
            values = rng.integers(0, 256, items * ITEM_SIZE[dtype], dtype=np.uint8)
    return values.view(np.uint8)


def _values(tensor: Tensor, spec: Synthetic, block: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    name = tensor.name
    if spec.like_globals and name.endswith("_scale_2"):
        name = name.replace(".up_proj.", ".gate_proj.")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    rng = np.random.Generator(np.random.PCG64([spec.seed, int.from_bytes(digest, "little")]))
    size = ITEM_SIZE[tensor.dtype]
    head = draw(tensor.dtype, rng, min(HEAD_ITEMS, math.prod(tensor.shape)))
    yield head
    left, start = tensor.nbytes - head.nbytes, int(rng.integers(BLOCK_ITEMS)) * size
    while left:
        part = block[start : start + left]
        yield part
        left, start = left - part.nbytes, 0


def _write_shard(path: Path, content: list[Tensor], spec: Synthetic, blocks: dict[str, NDArray[np.uint8]]) -> None:
    content = sorted(content, key=lambda tensor: (DTYPE_ORDER.index(tensor.dtype), tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in content:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in content:
            for part in _values(tensor, spec, blocks[tensor.dtype]):
                file.write(part.data)


def _small_files(spec: Synthetic) -> dict[str, object]:
    moe = range(spec.first_dense, spec.layers)
    routers = [f"model.layers.{layer}.mlp.gate" for layer in moe]
    if spec.shared_expert:
        routers += [f"model.layers.{layer}.mlp.shared_expert_gate" for layer in moe]
    awq = spec.format == "awq"
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "decoder_sparse_step": 1,
        "torch_dtype" if awq else "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": 512,
        "mlp_only_layers": list(range(spec.first_dense)),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": spec.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts" if awq else "num_local_experts": spec.experts,  # transformers 4 and 5
        "num_experts_per_tok": min(spec.top_k, spec.experts),
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab,
    }
    if spec.shared_expert:
        config["shared_expert_intermediate_size"] = spec.intermediate
    files: dict[str, object] = {"config.json": config}
    if awq:
        config["quantization_config"] = {
            "bits": 4,
            "group_size": spec.group_size,
            "modules_to_not_convert": ["self_attn", *routers],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
    else:
        attention = [f"model.layers.{layer}.self_attn*" for layer in range(spec.layers)]
        ignore = sorted(["lm_head", "model.embed_tokens", *routers, *attention])
        kind = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group: dict[str, object] = {"input_activations": kind} if spec.format == "nvfp4" else {}
        shared = {"quant_algo": spec.format.upper(), "producer": {"name": "modelopt", "version": "0.47.0"}}
        groups = {"group_0": {**group, "weights": kind, "targets": ["Linear"]}}
        config["quantization_config"] = {
            "config_groups": groups,
            "ignore": ignore,
            **shared,
            "quant_method": "modelopt",
        }
        files["hf_quant_config.json"] = {
            "producer": shared["producer"],
            "quantization": {
                "quant_algo": shared["quant_algo"],
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ignore,
            },
        }
    files["generation_config.json"] = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True}
    model = {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}
    files["tokenizer.json"] = {"version": "1.0", "added_tokens": [], "model": model}
    return files


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic MoE checkpoint.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=get_args(Format), default=Synthetic.format)
    for name in (
        "layers",
        "experts",
        "hidden",
        "intermediate",
        "group-size",
        "shards",
        "seed",
        "top-k",
        "first-dense",
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(Synthetic, name.replace("-", "_")), metavar="N")
    parser.add_argument("--vocab", type=int, default=Synthetic.vocab, metavar="N")
    parser.add_argument("--shared-expert", action="store_true")
    parser.add_argument("--like-globals", action="store_true", help="one weight_scale_2 for gate and up (NVFP4)")
    options = vars(parser.parse_args())
    write_checkpoint(options.pop("out"), Synthetic(**options))


if __name__ == "__main__":
    main()
