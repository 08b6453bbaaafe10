"""The manifest: what a sealed folder holds, digested; and the identity of a plan, which decides what may be mixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm70_convert import __version__, names
from sm70_convert.bank import FORMAT_VERSION, HASHES, FileRecord, check_relative, digests_of
from sm70_convert.checkpoint import read_small
from sm70_convert.errors import CheckpointError, IntegrityError, OutputError, Problem, Sm70Error
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.layout import LAYOUTS, runtime_flags
from sm70_convert.plan import Finding, Plan, in_order
from sm70_convert.strict_json import canonical, has_form, load_object, pretty

MANIFEST = "sm70/manifest.json"
MAX_TP = 1024
MAX_BANKS = 20_000
SUMS = "SHA256SUMS"


def _size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _positive(value: object) -> bool:
    return _size(value) and value != 0


def is_tp_size(value: object) -> bool:
    """Whether `value` is a number of ranks that a folder can have."""
    return _positive(value) and value <= MAX_TP  # type: ignore[operator]


def _layer(value: object) -> bool:
    return value is None or _size(value)


_FILE = {"path": str, "bytes": _size, "digest": str, "tensors": {str: str}}
_SOURCE = {"name": str, "experts": str, "digest": str}
_FINDING = {"message": str, "example": str, "count": _size, "layer": _layer}
# What each document holds, so that nothing that reads one need expect anything else.
RECORD_FORM = {"layer": _size, "banks": [_FILE], "sources": [_SOURCE], "findings": [_FINDING]}
IDENTITY_FORM = {
    "format_version": int,
    "tool_version": str,
    "hash": lambda value: isinstance(value, str) and value in HASHES,
    "source": {str: lambda value: value is None or isinstance(value, str)},
    "shards": {str: {"bytes": _size, "header": str}},
    "quantization": {
        "format": lambda value: isinstance(value, str) and value in LAYOUTS,
        "bits": _positive,
        "group_size": _positive,
        "zero_point": bool,
        "checkpoint_group_size": _positive,
    },
    "moe": {"layers": str, "experts": _positive, "hidden": _positive, "intermediate": _positive, "top_k": _positive},
    "layout": {
        "name": lambda value: any(value in layouts for layouts in LAYOUTS.values()),
        "interleave_gate_up": bool,
        "group_size": _positive,
        "runtime_flags": {str: str},
    },
}
_LAYER_FORM = {"layout": str, "interleave_gate_up": bool, "runtime_flags": {str: str}, "sources": [_SOURCE]}
_MANIFEST_FORM = {
    **IDENTITY_FORM,
    "tp_sizes": [is_tp_size],
    "layers": {str: _LAYER_FORM},
    "banks": [_FILE],
    "passthrough": [_FILE],
    "dropped": [{"name": str, "experts": str}],
    "findings": [_FINDING],
}


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The digest of one part of one projection over all experts of a layer, in expert order."""

    name: str
    experts: str
    digest: str


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A prepared layer: its bank files, the digests of its sources, and what was noticed. One line of the journal."""

    layer: int
    banks: tuple[FileRecord, ...]
    sources: tuple[SourceRecord, ...]
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LayerRecord:
        """The record that as_json() wrote. Raises KeyError or TypeError for anything else."""
        return cls(
            layer=value["layer"],
            banks=tuple(FileRecord(**b) for b in value["banks"]),
            sources=tuple(SourceRecord(**s) for s in value["sources"]),
            findings=tuple(Finding(**f) for f in value["findings"]),
        )


@dataclass(frozen=True)
class Manifest:
    """A sealed folder's contents. `identity` is what a further run must share with it, TP sizes aside."""

    identity: dict[str, Any]
    tp_sizes: tuple[int, ...]
    layers: dict[int, LayerRecord]
    passthrough: tuple[FileRecord, ...]
    dropped: tuple[dict[str, str], ...]
    findings: tuple[Finding, ...]

    @property
    def banks(self) -> dict[str, FileRecord]:
        """Every bank file by path."""
        return {b.path: b for record in self.layers.values() for b in record.banks}

    @property
    def files(self) -> dict[str, FileRecord]:
        """Every file that the manifest answers for, by path."""
        return {**{p.path: p for p in self.passthrough}, **self.banks}

    @property
    def hash(self) -> str:
        """The name of the hash of every digest."""
        return str(self.identity["hash"])

    def encode(self) -> bytes:
        """The bytes of manifest.json: sorted, and closed by a digest of everything else in it."""
        document: dict[str, Any] = {
            **self.identity,
            "tp_sizes": list(self.tp_sizes),
            "layers": {
                str(r.layer): {
                    "layout": self.identity["layout"]["name"],
                    "interleave_gate_up": self.identity["layout"]["interleave_gate_up"],
                    "runtime_flags": self.identity["layout"]["runtime_flags"],
                    "sources": [asdict(s) for s in r.sources],
                }
                for r in self.layers.values()
            },
            "banks": [b.as_json() for _, b in sorted(self.banks.items())],
            "passthrough": [p.as_json() for p in sorted(self.passthrough, key=lambda p: p.path)],
            "dropped": sorted(self.dropped, key=lambda d: d["name"]),
            "findings": [asdict(f) for f in in_order(self.findings)],
        }
        document["manifest_digest"] = digests_of(canonical(document))[self.hash]
        return pretty(document)


def plan_identity(plan: Plan) -> dict[str, Any]:
    """All that decides the bytes of a folder, TP sizes aside: two runs with equal identities may share one folder."""
    checkpoint, hash_name = plan.checkpoint, plan.options.hash
    source: dict[str, Any] = {"config": digests_of(checkpoint.raw_config)[hash_name]}
    if checkpoint.repo is not None:
        source = {"repo": checkpoint.repo, "commit": checkpoint.commit}
    elif checkpoint.index_digests is not None:
        source["index"] = checkpoint.index_digests[hash_name]
    shards = {
        name: {"bytes": shard.size, "header": shard.header_digests[hash_name]}
        for name, shard in sorted(checkpoint.shards.items())
    }
    return {
        "format_version": FORMAT_VERSION,
        "tool_version": __version__,
        "hash": hash_name,
        "source": source,
        "shards": shards,
        "quantization": {**asdict(plan.quantization), "checkpoint_group_size": plan.quantization.group_size},
        "moe": {**asdict(plan.moe), "layers": names.format_ranges(plan.moe.layers)},
        "layout": {
            "name": plan.layout.name,
            "interleave_gate_up": plan.layout.interleave_gate_up,
            "group_size": plan.layout.group_size,
            "runtime_flags": runtime_flags(plan.layout),
        },
    }


def difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first field in which two identities differ, as (dotted name, expected, actual), or None."""
    for key in sorted(set(expected) | set(actual)):
        a, b = expected.get(key), actual.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if found := difference(a, b):
                return (f"{key}.{found[0]}", found[1], found[2])
        elif a != b:
            return key, str(a), str(b)
    return None


def dropped_records(layers: tuple[LayerPlan, ...]) -> tuple[dict[str, str], ...]:
    """The dropped tensors of all layers: a name with `{expert}`, and the experts that have it."""
    return tuple(
        {"name": d.template, "experts": names.format_ranges(d.experts)} for layer in layers for d in layer.dropped
    )


def read_manifest(folder: Path, *, error: type[Sm70Error] = IntegrityError) -> Manifest:
    """The manifest of a sealed folder. Raises `error` if it is missing, altered, or of another format version."""
    try:
        raw = read_small(folder / MANIFEST, MANIFEST)
    except CheckpointError as exc:
        hint = "not a sealed folder: finish it with the same sm70-convert command, or with `sm70-convert seal`"
        if isinstance(exc.__cause__, OSError):
            hint = "mend the disk (or the rights), then run the same command again"
        raise error(Problem(exc.problems[0].message, file=MANIFEST, hint=hint)) from exc
    document = load_object(raw, MANIFEST, error=error)
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise error(
            Problem(
                "other format version",
                file=MANIFEST,
                expected=str(FORMAT_VERSION),
                actual=repr(version)[:100],
                hint="use the sm70-convert that wrote it, or another --out",
            )
        )
    hint = "restore it, or convert to another --out"
    digest = document.pop("manifest_digest", None)
    try:
        sound = digest == digests_of(canonical(document))[document["hash"]]
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise error(Problem("was altered or damaged: its own digest does not match", file=MANIFEST, hint=hint))
    try:
        return _decode(document)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        message = f"is none that this tool wrote, although its digest is right: {exc}"
        raise error(Problem(message, file=MANIFEST, hint=hint)) from None


def _decode(document: dict[str, Any]) -> Manifest:
    if not has_form(document, _MANIFEST_FORM):
        raise ValueError("another form")
    banks = [FileRecord(**b) for b in document.pop("banks")]
    findings = tuple(Finding(**f) for f in document.pop("findings"))
    layers = {
        int(layer): LayerRecord(
            layer=int(layer),
            banks=tuple(b for b in banks if b.path.endswith(f"/layer-{int(layer):05d}.safetensors")),
            sources=tuple(SourceRecord(**s) for s in entry["sources"]),
            findings=tuple(f for f in findings if f.layer == int(layer)),
        )
        for layer, entry in document.pop("layers").items()
    }
    passthrough = tuple(FileRecord(**p) for p in document.pop("passthrough"))
    for record in (*banks, *passthrough):
        check_relative(record.path)
    if names.parse_ranges(document["moe"]["layers"]) != tuple(sorted(layers)):
        raise ValueError("layers and moe.layers differ")
    tp_sizes = document["tp_sizes"]
    if not tp_sizes or tp_sizes != sorted(set(tp_sizes)) or sum(tp_sizes) * len(layers) > MAX_BANKS:
        raise ValueError("tp_sizes are no sizes")
    return Manifest(
        tp_sizes=tuple(document.pop("tp_sizes")),
        layers=dict(sorted(layers.items())),
        passthrough=passthrough,
        dropped=tuple(document.pop("dropped")),
        findings=findings,
        identity=document,
    )


def other_plan(file: str, field: tuple[str, str, str]) -> OutputError:
    """The refusal of a folder that another plan began."""
    return OutputError(
        Problem(
            f"belongs to another plan: {field[0]} differs",
            file=file,
            expected=field[1],
            actual=field[2],
            hint="use another --out, or --overwrite to start over",
        )
    )
