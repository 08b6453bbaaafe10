"""The runtime's own code after loading, run over banks that are there already.

Sources are meta tensors, so its conversion costs nothing. Where it would prepare, it gets meta outputs; where it would stack
what it prepared, it gets the bank. All else that it builds (pointers, attributes, buffers) it builds itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sm70_convert.errors import Problem, Sm70Error, UnsupportedError
from sm70_convert.layout import Layout, MoeShape, leading_dimensions, runtime_flags

_PREPARE = "_sm70_prepare"
_EXPAND = "nvfp4_expand_raw_scales_sm70_out"
_RAW_FLAG = "VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE"


class Replay(TorchFunctionMode):
    """Answers for one layer. A clean exit means that all was asked for as the banks have it; an error says what to change."""

    def __init__(
        self, banks: Mapping[str, Tensor], layout: Layout, moe: MoeShape, layer: int, rank: int, tp_size: int
    ) -> None:
        super().__init__()
        self.layout, self.moe, self.layer, self.rank = layout, moe, layer, rank
        self.prepared = 0
        self._unused = {name: bank.detach() for name, bank in banks.items()}
        self._asked: list[str] = []
        # Outcomes of calls over meta tensors; what the keys know by id must stay alive.
        self._made: dict[Any, Tensor] = {}
        self._alive: list[Tensor] = []
        self._outputs: dict[tuple[str, int, int], list[Tensor]] = {}
        leading = leading_dimensions(layout, moe, tp_size)
        width = 2 * (moe.intermediate // tp_size)
        # By (K, N): what to answer, and whether the bank is interleaved.
        self._matrices = {
            (moe.hidden, width): ([leading["w13_k_ld"], leading["w13_q_ld"]], layout.interleave_gate_up),
            (width // 2, moe.hidden): ([leading["w2_k_ld"], leading["w2_q_ld"]], False),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack:
            return self._stack(*args, **kwargs)
        if func is torch.equal and any(a.is_meta for a in args):
            # Whether raw codes stand for the fp16 scales exactly: that was checked when the bank was made.
            return self.layout.name == "nvfp4-raw"
        name = _op_name(func)
        if name is None:
            return self._once(func, args, kwargs)
        if _PREPARE in name:
            return self._prepare(name, *args, **kwargs)
        if name == _EXPAND:
            return self._expand(*args)
        if any(isinstance(a, Tensor) and a.is_meta for a in args):
            raise self._other_layout()
        return func(*args, **kwargs)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, traceback)  # type: ignore[no-untyped-call]
        if kind is not None:
            return
        if self._unused:
            raise self._other_layout()
        if self.prepared != 2 * self.moe.experts:
            raise self._error(
                "the runtime prepares another number of matrices than the bank holds",
                str(2 * self.moe.experts),
                str(self.prepared),
                "convert again with the sm70-convert that knows this runtime",
            )

    def _once(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function of torch; one over meta tensors alone only once for all experts, who are alike without data."""
        tensors: list[Tensor] = []
        if func is Tensor.__getitem__ and args[0].is_meta and isinstance(args[1], int):
            args = (args[0], 0)
        key = (func, _key(args, tensors), _key(kwargs.values(), tensors) if kwargs else None)
        if not tensors or not all(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        if key not in self._made:
            made = func(*args, **kwargs)
            if not isinstance(made, Tensor):
                return made
            self._made[key] = made
            self._alive += tensors
        return self._made[key]

    def _prepare(self, name: str, weight: Tensor, scales: Tensor, *rest: Any, **kwargs: Any) -> list[Tensor]:
        """Meta outputs in place of one matrix: weight, scales, [k_ld, q_ld]."""
        awq = name.startswith("awq")
        group_size, interleave, *_ = (*(rest[1:] if awq else rest), False)
        interleave = kwargs.get("interleave_gated_silu", interleave)
        if not (weight.is_meta and scales.is_meta):
            raise self._error("the runtime prepares real data over a bank", "meta tensors", name, "please report it")
        k, n = weight.shape[0], weight.shape[1] * (8 if awq else 1)
        if (k, n) not in self._matrices or group_size != self.layout.group_size:
            raise self._error(
                "the runtime prepares another shape than the bank's (K, N, group size)",
                " or ".join(str((*kn, self.layout.group_size)) for kn in self._matrices),
                str((k, n, group_size)),
                "config.json is not that of the checkpoint which was converted: restore it, or convert again",
            )
        leading, interleaved = self._matrices[k, n]
        if bool(interleave) != interleaved:
            raise self._other_interleave(bool(interleave))
        self.prepared += 1
        if (name, k, n) not in self._outputs:
            compact = "compact" in name
            shape = (scales.shape[0], n, 3) if compact else (scales.shape[0], n)
            dtype = torch.uint8 if compact else torch.int32 if awq else torch.float16
            self._outputs[name, k, n] = [
                torch.empty((k, n // 8), dtype=torch.int32, device="meta"),
                torch.empty(shape, dtype=dtype, device="meta"),
                torch.tensor(leading, dtype=torch.int64, device="cpu"),
            ]
        return self._outputs[name, k, n]

    def _stack(self, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
        """The bank that a stack of what was prepared would be."""
        first = tensors[0]
        if dim == 0 and first.is_meta and len(tensors) == self.moe.experts:
            for name, bank in self._unused.items():
                if (bank.dtype, bank.shape[1:]) == (first.dtype, first.shape):
                    return self._unused.pop(name)
            self._asked.append(_layout_of(first))
        return self._once(torch.stack, (tensors, dim), kwargs)

    def _expand(self, out: Tensor, codes: Tensor, *_: Any) -> None:
        """The runtime holds raw codes against fp16 scales. With an fp16 bank they never match: it goes on with fp16, or stops."""
        if codes.is_meta:
            if _RAW_FLAG in os.environ:
                self._asked.append("nvfp4-raw")
                raise self._other_layout()
            out.fill_(torch.nan)

    def _other_layout(self) -> Sm70Error:
        ours = self.layout.name
        asked = next((name for name in reversed(self._asked) if name != ours), "")
        if not asked:
            return self._error("the runtime does not use the whole bank", ours, "another layout", "please report it")
        return self._error(
            "the runtime asks for another layout than the folder has",
            ours,
            asked,
            f"set {_flags(self.layout, replace(self.layout, name=asked))} if this runtime can use {ours} for this shape, "
            f"or convert again with --layout {asked}",
        )

    def _other_interleave(self, asked: bool) -> Sm70Error:
        words = {True: "interleaved", False: "not interleaved"}
        other = replace(self.layout, interleave_gate_up=asked)
        return self._error(
            "the runtime asks for another order of gate and up in w13 than the folder has",
            words[not asked],
            words[asked],
            f"set {_flags(self.layout, other)} if this runtime can use that for this shape, "
            f"or convert again with --interleave {'on' if asked else 'off'}",
        )

    def _error(self, message: str, expected: str, actual: str, hint: str) -> Sm70Error:
        return UnsupportedError(
            Problem(message, layer=self.layer, rank=self.rank, expected=expected, actual=actual, hint=hint)
        )


def _key(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Arguments as something to look up by; their tensors are added to `tensors`."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            parts.append((Tensor, id(value)))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value, tensors))
        elif isinstance(value, slice):
            parts.append((slice, value.start, value.stop, value.step))
        else:
            # 1, 1.0 and True are equal, and not the same argument.
            parts.append((type(value), value))
    return tuple(parts)


def _op_name(func: Any) -> str | None:
    """The name of an operator of the runtime's libraries (torch.ops._C and the like), or None for a function of torch."""
    packet = getattr(func, "overloadpacket", func)
    namespace, _, name = str(getattr(packet, "_qualified_op_name", "")).partition("::")
    return name if namespace in ("_C", "_C_qwen38", "_moe_C") else None


def _layout_of(scales: Tensor) -> str:
    """The layout whose scales look like this, of one expert."""
    if scales.dtype == torch.int32:
        return "awq-half2"
    if scales.dtype == torch.float16:
        return "nvfp4-fp16"
    if scales.dim() == 3:
        return "awq-compact" if scales.shape[-1] == 3 else "awq-int4zero"
    return "nvfp4-raw"


def _flags(ours: Layout, asked: Layout) -> str:
    """The settings to change from `asked` to get `ours`."""
    wanted, now = runtime_flags(ours), runtime_flags(asked)
    return " ".join(f"{flag}={value}" for flag, value in wanted.items() if now[flag] != value)
