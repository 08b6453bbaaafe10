"""A Qwen3-MoE model in fp32 from a prepared folder's files, by the layouts' closed forms: it shares no code with the tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import silu

if TYPE_CHECKING:
    from numpy.typing import NDArray

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def bank_weights(path: Path) -> list[dict[str, torch.Tensor]]:
    """Each expert's gate, up and down [N, K] of one rank's bank file (awq-half2 or nvfp4-fp16)."""
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["sm70_bank"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert about["layout"] in ("awq-half2", "nvfp4-fp16")
    experts = []
    for e in range(about["num_experts"]):
        w13, w2 = (_weight(tensors[f"{m}_tm_weight"][e], tensors[f"{m}_tm_scales"][e]) for m in ("w13", "w2"))
        half = w13.shape[1] // 2
        gate, up = (w13[:, 0::2], w13[:, 1::2]) if about["interleave_gate_up"] else (w13[:, :half], w13[:, half:])
        experts.append({"gate": _tensor(gate), "up": _tensor(up), "down": _tensor(w2)})
    return experts


def _weight(words: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float32]:
    """fp32 [K, N] of one bank matrix."""
    k, n = words.shape[0], words.shape[1] * 8
    rows, columns = np.meshgrid(np.arange(k), np.arange(n), indexing="ij")
    place = np.argsort((0, 2, 4, 6, 1, 3, 5, 7))[rows % 8]  # which nibble holds the row
    word = words.reshape(-1).view(np.uint32)[((columns // 32) * (k // 8) + rows // 8) * 32 + columns % 32]
    code = (word >> (4 * place).astype(np.uint32)) & 15
    repeat = k // scales.shape[0]
    if scales.dtype == np.float16:
        return E2M1[code] * np.repeat(scales.astype(np.float32), repeat, axis=0)
    halves = np.ascontiguousarray(scales).view(np.float16).reshape(*scales.shape, 2).astype(np.float32)
    scale, bias = halves[..., 0], halves[..., 1]
    zero = np.rint(-bias / scale)
    return ((code - np.repeat(zero, repeat, axis=0)) * np.repeat(scale, repeat, axis=0)).astype(np.float32)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.T))


class TinyQwen3Moe:
    """logits(ids) of the model in `folder`, experts from the banks of `tp_size` ranks put together again."""

    def __init__(self, folder: Path, tp_size: int) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
        self.raw = {k: v for f in sorted(files) for k, v in load_file(folder / f).items()}
        self.experts: dict[int, list[dict[str, torch.Tensor]]] = {}
        for path in sorted((folder / f"sm70/tp{tp_size}/rank0").glob("*.safetensors")):
            ranks = [bank_weights(folder / f"sm70/tp{tp_size}/rank{r}" / path.name) for r in range(tp_size)]
            self.experts[int(path.stem.removeprefix("layer-"))] = [
                {p: torch.cat([part[p] for part in parts], dim=1 if p == "down" else 0) for p in ("gate", "up", "down")}
                for parts in zip(*ranks, strict=True)
            ]
        self.weights: dict[str, torch.Tensor] = {}

    def weight(self, name: str) -> torch.Tensor:
        """The weight of a module outside the banks, fp32 [N, K]."""
        if name not in self.weights:
            self.weights[name] = self._dense(name)
        return self.weights[name]

    def _dense(self, name: str) -> torch.Tensor:
        if f"{name}.qweight" in self.raw:
            q, z = (_awq(self.raw[f"{name}.{part}"].numpy()) for part in ("qweight", "qzeros"))
            scale, repeat = self.raw[f"{name}.scales"].float().numpy(), len(q) // len(z)
            return _tensor((q - np.repeat(z, repeat, axis=0)) * np.repeat(scale, repeat, axis=0))
        if f"{name}.weight_scale_2" in self.raw:
            packed = self.raw[f"{name}.weight"].numpy()
            codes = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
            scale = self.raw[f"{name}.weight_scale"].float() * self.raw[f"{name}.weight_scale_2"]
            return torch.from_numpy(codes) * scale.repeat_interleave(16, dim=1)
        return self.raw[f"{name}.weight"].float()

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, S] -> fp32 [B, S, vocabulary]. Causal: a position's logits do not depend on what follows."""
        x = self.weight("model.embed_tokens")[ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn")
            inner = self._norm(x, f"{prefix}.post_attention_layernorm")
            x = x + (self._moe(inner, layer) if layer in self.experts else self._mlp(inner, f"{prefix}.mlp"))
        return self._norm(x, "model.norm") @ self.weight("lm_head").T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weight(name)

    def _attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        batch, length, size = *x.shape[:2], self.config["head_dim"]
        q, k, v = ((x @ self.weight(f"{name}.{p}_proj").T).view(batch, length, -1, size).transpose(1, 2) for p in "qkv")
        q, k = (self._rope(self._norm(t, f"{name}.{p}_norm")) for t, p in ((q, "q"), (k, "k")))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        return mixed @ self.weight(f"{name}.o_proj").T

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        theta = (self.config.get("rope_parameters") or self.config)["rope_theta"]
        angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin, left, right = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.weight(f"{name}.{p}_proj").T for p in ("gate", "up", "down"))
        return (silu(x @ gate) * (x @ up)) @ down

    def _moe(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        chance, chosen = (
            (x @ self.weight(f"model.layers.{layer}.mlp.gate").T).softmax(-1).topk(self.config["num_experts_per_tok"])
        )
        chance = chance / chance.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts[layer]):
            share = (chance * (chosen == number)).sum(-1, keepdim=True)
            out += share * ((silu(x @ expert["gate"].T) * (x @ expert["up"].T)) @ expert["down"].T)
        return out


def _awq(words: NDArray[Any]) -> NDArray[np.float32]:
    nibbles = [(words.view(np.uint32) >> (4 * i)) & 15 for i in AWQ_ORDER]
    return np.stack(nibbles, -1).reshape(len(words), -1).astype(np.float32)


def find_prompts(model: TinyQwen3Moe, *, steps: int, margin: float) -> list[list[int]]:
    """Two prompts whose greedy answer ends by EOS within `steps` tokens, then two whose answer does not.

    Every token chosen leads the second best by `margin` of log-probability, and so does every router choice by its own: no answer
    hangs on the last bits of a sum.
    """
    generator = torch.Generator().manual_seed(0)
    eos, vocabulary = model.config["eos_token_id"], model.config["vocab_size"]
    ended: list[list[int]] = []
    running: list[list[int]] = []
    for _ in range(40):
        prompts = torch.randint(3, vocabulary, (128, 6), generator=generator)
        ids, sure = prompts, torch.ones(len(prompts), dtype=torch.bool)
        done = torch.zeros(len(prompts), dtype=torch.bool)
        length = torch.full((len(prompts),), steps)
        for step in range(steps):
            best = model.logits(ids)[:, -1].log_softmax(-1).topk(2)
            sure &= done | (best.values[:, 0] - best.values[:, 1] > margin)
            ends = ~done & (best.indices[:, 0] == eos)
            length[ends] = step + 1
            done |= ends
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
        ended += [p for p, ok in zip(prompts.tolist(), (sure & done & (length > 3)).tolist(), strict=True) if ok]
        running += [p for p, ok in zip(prompts.tolist(), (sure & ~done).tolist(), strict=True) if ok]
        if len(ended) >= 2 and len(running) >= 2:
            return [*ended[:2], *running[:2]]
    raise AssertionError("no prompts found")
