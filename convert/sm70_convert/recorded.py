"""Recorded hashes: what a runtime prepared itself, one JSON file a rank, and how a prepared folder is held against them.

    rank0-of-4.json   {"format_version": 1, "rank": 0, "tp_size": 4, "hash": "blake3", "layers": {"3": {
                       "layout": "awq-half2", "interleave_gate_up": true, "flags": {...}, "tensors": {name: digest, ...}}}}

`flags` (optional) are the layout's environment settings that were set. A pipeline stage holds some of the layers: its file is
`rank0-of-4-stage1.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm70_convert import names
from sm70_convert.bank import HASHES, FileRecord, bank_path, write_small
from sm70_convert.checkpoint import read_small, reading
from sm70_convert.errors import CheckpointError, IntegrityError, Problem, UsageError
from sm70_convert.layout import LAYOUT_NAMES
from sm70_convert.manifest import MANIFEST, Manifest, read_manifest
from sm70_convert.strict_json import load_object, pretty

RECORD_VERSION = 1
MAX_PROBLEMS = 100
_FILE = re.compile(r"rank[0-9]+-of-[0-9]+(-stage[0-9]+)?\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HOW = (
    "record a start: vllm serve MODEL --load-format sm70_record --model-loader-extra-config "
    """'{"record_hashes": "FOLDER"}'"""
)


@dataclass(frozen=True, slots=True)
class RecordedLayer:
    """One layer of one rank: the layout it was prepared in, and the digest of every tensor."""

    layout: str
    interleave_gate_up: bool
    tensors: dict[str, str]
    flags: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the record's file."""
        flags = {"flags": self.flags} if self.flags else {}
        return {
            "layout": self.layout,
            "interleave_gate_up": self.interleave_gate_up,
            **flags,
            "tensors": self.tensors,
        }


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank prepared. `file` says where it was read, for messages."""

    rank: int
    tp_size: int
    hash: str
    layers: dict[int, RecordedLayer]
    file: str = ""

    def encode(self) -> bytes:
        """The bytes of the record's file: the same for the same digests."""
        return pretty(
            {
                "format_version": RECORD_VERSION,
                "rank": self.rank,
                "tp_size": self.tp_size,
                "hash": self.hash,
                "layers": {str(layer): entry.as_json() for layer, entry in self.layers.items()},
            }
        )


def record_name(rank: int, tp_size: int, stage: int | None = None) -> str:
    """The file name of a rank's record. stage: of a pipeline, where there are several."""
    return f"rank{rank}-of-{tp_size}{'' if stage is None else f'-stage{stage}'}.json"


def write_record(folder: Path, record: Record, stage: int | None = None) -> Path:
    """Writes a record atomically, over an earlier one of the same rank. Raises OutputError."""
    name = record_name(record.rank, record.tp_size, stage)
    write_small(folder.resolve(), name, record.encode(), HASHES[record.hash])
    return folder / name


def read_record(path: Path) -> Record:
    """The record in one file. Raises IntegrityError unless it is exactly what write_record() writes."""
    try:
        raw = read_small(path, str(path))
    except CheckpointError as exc:
        raise IntegrityError(*exc.problems) from exc
    document = load_object(raw, str(path), error=IntegrityError)
    version = document.pop("format_version", None)
    if version != RECORD_VERSION:
        raise IntegrityError(
            Problem(
                "recorded hashes are of another format version",
                file=str(path),
                expected=str(RECORD_VERSION),
                actual=repr(version)[:100],
                hint="record and verify with the same sm70-convert",
            )
        )
    try:
        return _decode(document, str(path))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise IntegrityError(Problem("is no record of hashes, or was altered", file=str(path), hint=_HOW)) from None


def _decode(document: dict[str, Any], file: str) -> Record:
    rank, tp_size = document["rank"], document["tp_size"]
    layers = {
        int(layer): RecordedLayer(
            entry["layout"], entry["interleave_gate_up"], dict(entry["tensors"]), dict(entry.get("flags", {}))
        )
        for layer, entry in document["layers"].items()
    }
    sound = (
        set(document) == {"rank", "tp_size", "hash", "layers"}
        and type(rank) is int
        and type(tp_size) is int
        and 0 <= rank < tp_size
        and isinstance(document["hash"], str)
        and bool(layers)
        and [str(layer) for layer in layers] == list(document["layers"])
        and all(layer >= 0 and _sound_layer(entry) for layer, entry in layers.items())
    )
    if not sound:
        raise ValueError(file)
    return Record(rank, tp_size, document["hash"], dict(sorted(layers.items())), file)


def _sound_layer(entry: RecordedLayer) -> bool:
    return (
        entry.layout in LAYOUT_NAMES
        and type(entry.interleave_gate_up) is bool
        and bool(entry.tensors)
        and all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in entry.tensors.values())
        and all(isinstance(v, str) for v in entry.flags.values())
    )


def records_at(path: Path) -> list[Record]:
    """The records at `path`: one file, a folder of them, or another prepared folder (what its manifest says).

    Raises UsageError if there is no such path, IntegrityError if it holds no record or a bad one.
    """
    with reading(str(path), error=IntegrityError):
        if not path.exists():
            raise UsageError(Problem(f"--against {path}: no such file or folder", hint=_HOW))
        if path.is_file():
            return [read_record(path)]
        if (path / MANIFEST).exists():
            return list(records_of(read_manifest(path), str(path)))
        files = sorted(p for p in path.iterdir() if _FILE.fullmatch(p.name))
    if not files:
        raise IntegrityError(
            Problem("holds neither records of hashes (rank0-of-1.json ...) nor a manifest", file=str(path), hint=_HOW)
        )
    return [read_record(file) for file in files]


def records_of(manifest: Manifest, file: str) -> Iterator[Record]:
    """What a prepared folder would have recorded, rank by rank."""
    layout = manifest.identity["layout"]
    banks = manifest.banks
    for tp_size in manifest.tp_sizes:
        for rank in range(tp_size):
            layers = {
                layer: RecordedLayer(layout["name"], layout["interleave_gate_up"], dict(bank.tensors))
                for layer in manifest.layers
                if (bank := banks.get(bank_path(tp_size, rank, layer)))
            }
            yield Record(rank, tp_size, manifest.hash, layers, file)


def compare_recorded(manifest: Manifest, paths: Sequence[Path], *, rank: int | None = None) -> int:
    """Holds a folder's manifest against every record at `paths`; returns the number of digests compared.

    Every layer of every rank of each recorded TP size must be recorded. rank: this rank's records alone.
    Raises IntegrityError with every difference.
    """
    records = [r for path in paths for r in records_at(path) if rank is None or r.rank == rank]
    if not records:
        raise IntegrityError(Problem("nothing is recorded of it", rank=rank, file=_shown(map(str, paths)), hint=_HOW))
    banks, compared, problems = manifest.banks, 0, []
    for record in records:
        if problem := _other_kind(manifest, record):
            problems.append(problem)
            continue
        for layer, entry in record.layers.items():
            if layer not in manifest.layers:
                problems.append(_no_layer(record, layer))
            elif problem := _other_layout(manifest, record, layer, entry):
                problems.append(problem)
            else:
                bank = banks[bank_path(record.tp_size, record.rank, layer)]
                compared += len(bank.tensors)
                problems += _wrong_tensors(record, layer, entry, bank)
    problems += _not_recorded(manifest, records, rank)
    if problems:
        raise IntegrityError(*problems[:MAX_PROBLEMS], total=len(problems))
    return compared


def _other_kind(manifest: Manifest, record: Record) -> Problem | None:
    """Why a record cannot be compared at all."""
    if record.tp_size not in manifest.tp_sizes:
        return Problem(
            "is of a TP size that this folder has no banks for",
            file=record.file,
            rank=record.rank,
            expected=f"TP size {_or(manifest.tp_sizes)}",
            actual=str(record.tp_size),
            hint=f"add banks: sm70-convert MODEL --out DIR --tp-size {record.tp_size}",
        )
    if record.hash != manifest.hash:
        return Problem(
            "has digests of another algorithm than this folder",
            file=record.file,
            rank=record.rank,
            expected=manifest.hash,
            actual=record.hash,
            hint=f'record again with "record_hash": "{manifest.hash}", or convert with --hash {record.hash}',
        )
    return None


def _no_layer(record: Record, layer: int) -> Problem:
    return Problem(
        "has a layer that this folder has no banks of",
        file=record.file,
        layer=layer,
        rank=record.rank,
        hint="compare with the folder that was made of the same checkpoint",
    )


def _other_layout(manifest: Manifest, record: Record, layer: int, entry: RecordedLayer) -> Problem | None:
    ours = manifest.identity["layout"]
    if (entry.layout, entry.interleave_gate_up) == (ours["name"], ours["interleave_gate_up"]):
        return None
    flags = " ".join(f"{name}={value}" for name, value in ours["runtime_flags"].items())
    state = "on" if entry.interleave_gate_up else "off"
    return Problem(
        "has another layout than this folder",
        file=record.file,
        layer=layer,
        rank=record.rank,
        expected=_layout_text(ours["name"], ours["interleave_gate_up"]),
        actual=_layout_text(entry.layout, entry.interleave_gate_up),
        hint=f"convert with --layout {entry.layout} --interleave {state}, or start the runtime with {flags}",
    )


def _layout_text(name: str, interleave: bool) -> str:
    return f"{name}, interleave {'on' if interleave else 'off'}"


def _wrong_tensors(record: Record, layer: int, entry: RecordedLayer, bank: FileRecord) -> Iterator[Problem]:
    """Tensors whose digest differs, or that only one side has."""
    for tensor in sorted({*bank.tensors, *entry.tensors}):
        recorded, ours = entry.tensors.get(tensor, "no such tensor"), bank.tensors.get(tensor, "no such tensor")
        if recorded != ours:
            yield Problem(
                f"is not what {record.file} says",
                tensor,
                bank.path,
                layer,
                record.rank,
                expected=recorded,
                actual=ours,
                hint="check with `sm70-convert verify DIR --source MODEL` that both are made of the same checkpoint, "
                "and report it if they are",
            )


def _not_recorded(manifest: Manifest, records: Sequence[Record], rank: int | None) -> Iterator[Problem]:
    """Layers of the folder that no record has, for each rank of each TP size that was recorded."""
    seen = {(r.tp_size, r.rank, layer) for r in records for layer in r.layers}
    for tp_size in sorted({r.tp_size for r in records} & set(manifest.tp_sizes)):
        for r in range(tp_size) if rank is None else (rank,):
            files = dict.fromkeys(x.file for x in records if (x.tp_size, x.rank) == (tp_size, r))
            missing = [layer for layer in manifest.layers if (tp_size, r, layer) not in seen]
            if not files:
                yield Problem(
                    f"has no record at all of TP size {tp_size}",
                    rank=r,
                    hint="give the records of every rank (--against may be repeated), or one rank alone with --rank",
                )
            elif missing:
                yield Problem(
                    f"lacks layers {names.format_ranges(missing)}, which this folder has",
                    file=_shown(files),
                    rank=r,
                    hint="give the records of every pipeline stage; a layer that the runtime did not prepare into "
                    "banks went to another backend: its log says which",
                )


def _shown(files: Iterable[str]) -> str:
    return ", ".join(files)


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
