"""verify: a sealed folder against its manifest, and against the checkpoint by the independent reference."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm70_convert import names
from sm70_convert.bank import HASHES, FileRecord, bank_spec, digests_of, layer_bank_paths, measure
from sm70_convert.checkpoint import CONFIG, INDEX, Checkpoint, reading, walk
from sm70_convert.errors import IntegrityError, Problem, Sm70Error, UsageError
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.experts import ExpertReader
from sm70_convert.journal import is_own_state, unfinished
from sm70_convert.layout import Layout, MoeShape
from sm70_convert.manifest import MANIFEST, SUMS, Manifest, difference, plan_identity
from sm70_convert.passthrough import SENTINEL, config_bytes, index_bytes, rewritten_header, sentinel_header
from sm70_convert.plan import Options, Plan, build_plan
from sm70_convert.safetensors_header import Header, read_at, read_file_header

if TYPE_CHECKING:
    import torch

MAX_PROBLEMS = 100
_EXTRA = "is not named by the manifest"
_RESTORE = "restore the file from a good copy, or convert again with --overwrite"
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared and what was wrong. kind: quick, digests or source. against: recorded digests that were compared too."""

    kind: str
    files: int
    tensors: int
    experts: int
    bytes: int
    problems: tuple[Problem, ...]
    against: int | None = None

    def raise_if_damaged(self) -> None:
        """Raises IntegrityError for what is missing or cut, not for files that are merely too many."""
        damaged = tuple(p for p in self.problems if p.message != _EXTRA)
        if damaged:
            raise IntegrityError(*damaged[:MAX_PROBLEMS], total=len(damaged))

    def raise_if_any(self) -> None:
        """Raises IntegrityError with every problem."""
        if self.problems:
            raise IntegrityError(*self.problems[:MAX_PROBLEMS], total=len(self.problems))


def chosen_files(manifest: Manifest, rank: int | None) -> list[FileRecord]:
    """What verify() is about: all files, or with a rank its banks and what passes through."""
    banks = [b for path, b in sorted(manifest.banks.items()) if rank is None or f"/rank{rank}/" in path]
    return [*manifest.passthrough, *banks]


def verify_folder(
    folder: Path,
    manifest: Manifest,
    *,
    quick: bool = False,
    rank: int | None = None,
    jobs: int = 1,
    progress: Progress = lambda _: None,
) -> Verification:
    """Checks the files of a sealed folder: the set, sizes and (unless quick) headers and every digest.

    rank: only this rank's banks, and what passes through. progress(n) is called for every n bytes read.
    """
    wanted = chosen_files(manifest, rank)
    problems: list[Problem] = []
    sizes = 0
    whole: list[FileRecord] = []
    for record in sorted(wanted, key=lambda r: r.path):
        if (problem := _wrong_size(folder, record)) is not None:
            problems.append(problem)
        else:
            whole.append(record)
            sizes += record.bytes
    journals = unfinished(folder)
    with reading(str(folder), error=IntegrityError, hint=_RESTORE):
        extra = [p for p in extra_files(folder, manifest) if not is_own_state(p)]
    # The banks of an addition that was stopped, or is still going, are nobody's damage.
    extra = [p for p in extra if not any(j.names_bank(p) for j in journals)]
    problems += [Problem(_EXTRA, file=path, hint="move the file away") for path in extra]
    problems += _missing_banks(manifest)
    if quick:
        return Verification("quick", len(wanted), 0, 0, sizes, tuple(problems))
    headers = expected_headers(manifest)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for found in pool.map(
            lambda r: list(_wrong_bytes(folder, r, manifest.hash, headers.get(r.path), progress)), whole
        ):
            problems += found
    return Verification("digests", len(wanted), sum(len(r.tensors) for r in wanted), 0, sizes, tuple(problems))


def manifest_moe(manifest: Manifest) -> tuple[MoeShape, Layout, int]:
    """The shape, layout and checkpoint group size that a manifest states."""
    moe, layout = dict(manifest.identity["moe"]), manifest.identity["layout"]
    moe["layers"] = names.parse_ranges(moe["layers"])
    return (
        MoeShape(**moe),
        Layout(layout["name"], layout["interleave_gate_up"], layout["group_size"]),
        manifest.identity["quantization"]["checkpoint_group_size"],
    )


def expected_headers(manifest: Manifest) -> dict[str, Header]:
    """The header that each bank must have, rebuilt from the manifest's shape and layout."""
    moe, layout, group = manifest_moe(manifest)
    return {
        spec.path: spec.header
        for tp_size in manifest.tp_sizes
        for rank in range(tp_size)
        for layer in moe.layers
        for spec in (bank_spec(layout, moe, group, layer, rank, tp_size),)
    }


def _wrong_size(folder: Path, record: FileRecord) -> Problem | None:
    path = folder / record.path
    ours = record.path.startswith("sm70/")
    try:
        # A passed-through shard may be a symlink (--passthrough symlink); a bank, or a folder on the way, never is.
        info = path.lstat() if ours else path.stat()
        below = [p for p in (path, *path.parents) if folder in p.parents]
        links = [p for p in (below if ours else below[1:]) if p.is_symlink()]
    except OSError as exc:
        return Problem(f"is missing or cannot be read: {exc.strerror}", file=record.path, hint=_RESTORE)
    if links:
        shown = links[-1].relative_to(folder).as_posix()
        return Problem("is a symlink, which a bank or a folder never is", file=shown, hint=_RESTORE)
    if info.st_size != record.bytes or not stat.S_ISREG(info.st_mode):
        expected = f"{record.bytes} bytes"
        return Problem(
            "has the wrong size", file=record.path, expected=expected, actual=str(info.st_size), hint=_RESTORE
        )
    return None


def _wrong_bytes(
    folder: Path, record: FileRecord, hash_name: str, header: Header | None, progress: Progress
) -> Iterator[Problem]:
    hint = _RESTORE
    try:
        found = measure(folder / record.path, record.path, HASHES[hash_name], then=progress)
        if header is not None:
            with reading(record.path, error=IntegrityError, hint=_RESTORE), open(folder / record.path, "rb") as file:
                if file.read(len(header.raw)) != header.raw:
                    yield Problem("header is not what the manifest says of it", file=record.path, hint=hint)
    except Sm70Error as exc:
        yield from (replace(p, hint=p.hint or hint) for p in exc.problems)
        return
    wrong = [t for t, digest in record.tensors.items() if found.tensors.get(t) != digest]
    for tensor in wrong:
        yield Problem(
            "has other bytes than the manifest says",
            tensor,
            record.path,
            expected=record.tensors[tensor],
            actual=str(found.tensors.get(tensor)),
            hint=hint,
        )
    if not wrong and found.digest != record.digest:
        what = (
            "header has other bytes than the manifest says"
            if record.tensors
            else "has other bytes than the manifest says"
        )
        yield Problem(what, file=record.path, expected=record.digest, actual=found.digest, hint=hint)


def _missing_banks(manifest: Manifest) -> Iterator[Problem]:
    called_for = {path for layer in manifest.layers for path in layer_bank_paths(layer, manifest.tp_sizes)}
    for path in sorted(called_for - set(manifest.banks)):
        yield Problem(f"does not name {path}, which its layers and TP sizes call for", file=MANIFEST)


def extra_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Files that no record names. Hidden ones at the top (.gitattributes, .cache) do no harm and do not count."""
    known = {*manifest.files, MANIFEST}
    if manifest.hash == "sha256":
        known.add(SUMS)
    for root, folders, files in walk(folder):
        relative = Path(root).relative_to(folder)
        if relative == Path():
            folders[:] = [f for f in folders if not f.startswith(".")]
        folders.sort()
        for name in sorted(files):
            path = (relative / name).as_posix()
            if path not in known and not (relative == Path() and name.startswith(".")):
                yield path


def source_plan(manifest: Manifest, checkpoint: Checkpoint) -> Plan:
    """The plan that made a folder, rebuilt on a checkpoint. Raises IntegrityError if that is another checkpoint."""
    _, layout, _ = manifest_moe(manifest)
    options = Options(
        tp_sizes=manifest.tp_sizes,
        layout=layout.name,
        interleave="on" if layout.interleave_gate_up else "off",
        hash=manifest.hash,
    )
    try:
        plan = build_plan(checkpoint, options)
    except UsageError as exc:  # the folder's layout is not for this checkpoint's format
        message = f"was made from another kind of checkpoint than {checkpoint.folder}"
        raise IntegrityError(
            Problem(message, file=MANIFEST, hint="give the checkpoint that this folder was made from")
        ) from exc
    # The same bytes may have come from the hub or a folder, and by another version of this tool.
    ours = {k: v for k, v in plan_identity(plan).items() if k not in ("source", "tool_version")}
    theirs = {k: v for k, v in manifest.identity.items() if k not in ("source", "tool_version")}
    if field := difference(theirs, ours):
        raise IntegrityError(
            Problem(
                f"was made from another checkpoint: {field[0]} differs",
                file=MANIFEST,
                expected=field[1],
                actual=field[2],
                hint="give the checkpoint that this folder was made from",
            )
        )
    return plan


def source_bytes(plan: Plan, manifest: Manifest, sample: int | None) -> int:
    """The bytes that verify_source() tells its progress of: what passes through, and the sources of the chosen experts."""
    passing = {*plan.checkpoint.extras, *(shard.name for shard in plan.passthrough)}
    experts = len(_chosen_experts(plan, 0, sample))
    return sum(r.bytes for r in manifest.passthrough if r.path in passing) + sum(
        experts * s.nbytes for layer in plan.layers for s in layer.sources
    )


def verify_source(
    folder: Path,
    manifest: Manifest,
    plan: Plan,
    *,
    sample: int | None = None,
    rank: int | None = None,
    progress: Progress = lambda _: None,
    layer_done: Progress = lambda _: None,
) -> Verification:
    """Prepares experts again with the independent reference and compares every bit; compares what passes through too.

    plan: from source_plan(). sample: this many experts a layer (always the same ones for a layer), else all: what is wrong with
    the others stays unseen. The files must have passed verify_folder().
    """
    import sm70_kernels.reference  # noqa: F401 - torch takes seconds, and may find no memory: not inside what reads files

    problems = list(_wrong_passthrough(folder, manifest, plan, progress))
    experts = tensors = 0
    for layer in plan.layers:
        with reading(str(folder), error=IntegrityError, hint=_RESTORE):
            prepared, compared, found = _verify_layer(folder, plan, layer, sample, rank, progress)
        problems += found
        experts += prepared
        tensors += compared
        layer_done(layer.layer)
    files = chosen_files(manifest, rank)
    return Verification("source", len(files), tensors, experts, sum(r.bytes for r in files), tuple(problems))


def _chosen_experts(plan: Plan, layer: int, sample: int | None) -> Sequence[int]:
    if sample is None or sample >= plan.moe.experts:
        return range(plan.moe.experts)
    return sorted(random.Random(layer).sample(range(plan.moe.experts), sample))  # noqa: S311 - which experts, not a secret


def _verify_layer(
    folder: Path, plan: Plan, layer: LayerPlan, sample: int | None, rank: int | None, progress: Progress
) -> tuple[int, int, list[Problem]]:
    """Experts and tensors compared in one layer, and what differs. The banks' headers must have been verified."""
    from sm70_kernels.reference import prepare_rank

    reader = ExpertReader(plan, layer)
    chosen = _chosen_experts(plan, layer.layer, sample)
    problems: list[Problem] = []
    compared = 0
    banks = [
        bank_spec(plan.layout, plan.moe, plan.quantization.group_size, layer.layer, r, tp_size)
        for tp_size in plan.tp_sizes
        for r in range(tp_size)
        if rank is None or r == rank
    ]
    with ExitStack() as opened:
        files = []
        for bank in banks:
            with reading(bank.path, error=IntegrityError, hint=_RESTORE):
                files.append(opened.enter_context(open(folder / bank.path, "rb", buffering=0)))
        for expert in chosen:
            projections = reader.read(expert)
            for bank, file in zip(banks, files, strict=True):
                wanted = prepare_rank(
                    *(projections[p] for p in names.PROJECTIONS),
                    layout=plan.layout.name,
                    interleave=plan.layout.interleave_gate_up,
                    rank=bank.rank,
                    tp_size=bank.tp_size,
                )
                with reading(bank.path, error=IntegrityError, hint=_RESTORE):
                    found = _bank_expert(file.fileno(), bank.header, expert, plan.moe.experts)
                for tensor, value in wanted.items():
                    compared += 1
                    if found.get(tensor) != _bytes(value):
                        message = f"expert {expert} is not what its source makes"
                        problems.append(Problem(message, tensor, bank.path, layer.layer, bank.rank, hint=_RESTORE))
            progress(sum(s.nbytes for s in layer.sources))
    return len(chosen), compared, problems


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _bank_expert(fd: int, header: Header, expert: int, experts: int) -> dict[str, bytes]:
    """The bytes of one expert in every tensor of a bank whose header has been verified."""
    size = {name: e.nbytes // experts for name, e in header.tensors.items()}
    return {name: read_at(fd, e.offset + expert * size[name], size[name]) for name, e in header.tensors.items()}


def _wrong_passthrough(folder: Path, manifest: Manifest, plan: Plan, progress: Progress) -> Iterator[Problem]:
    """What passes through and is not byte for byte the source's, or what its source makes."""
    hash_name = plan.options.hash
    for shard in plan.passthrough:
        try:
            found = measure(folder / shard.name, shard.name, HASHES[hash_name], then=progress).tensors
            size = read_file_header(folder / shard.name, shard.name, error=IntegrityError).data_start
            with reading(shard.name, error=IntegrityError, hint=_RESTORE), open(folder / shard.name, "rb") as file:
                header = file.read(size)
        except IntegrityError as exc:
            yield from exc.problems
            continue
        wanted = _tensor_digests(plan, shard.tensors)
        wrong = [tensor for tensor in sorted(set(found) | set(wanted)) if found.get(tensor) != wanted.get(tensor)]
        for tensor in wrong:
            yield Problem("is not the source's tensor", tensor, shard.name, hint=_RESTORE)
        digests = plan.checkpoint.shards[shard.name].header_digests
        if not shard.whole:
            digests = digests_of(rewritten_header(plan, shard).raw)
        if not wrong and digests_of(header)[hash_name] != digests[hash_name]:
            yield Problem("has another header than its source makes", file=shard.name, hint=_RESTORE)
    # A hub snapshot and a folder of the same checkpoint may differ in how many other files they bring.
    for name in sorted(set(plan.checkpoint.extras) & {p.path for p in manifest.passthrough}):
        source = measure(plan.checkpoint.folder / name, name, HASHES[hash_name], plain=True)
        if measure(folder / name, name, HASHES[hash_name], then=progress, plain=True) != source:
            yield Problem("is not the source's file", file=name, hint=_RESTORE)
    sentinel = sentinel_header().raw + b"\0"
    for name, data in ((CONFIG, config_bytes(plan)), (INDEX, index_bytes(plan)), (SENTINEL, sentinel)):
        with reading(name, error=IntegrityError, hint=_RESTORE):
            same = (folder / name).read_bytes() == data
        if not same:
            yield Problem("is not what its source makes", file=name, hint=_RESTORE)


def _tensor_digests(plan: Plan, tensors: tuple[str, ...]) -> dict[str, str]:
    digests = {}
    for name in tensors:
        ref, digest = plan.checkpoint.refs[name], HASHES[plan.options.hash]()
        for piece in plan.checkpoint.shards[ref.file].pieces(ref.offset, ref.nbytes):
            digest.update(piece)
        digests[name] = digest.hexdigest()
    return digests
