"""verify --source against banks that are wrong but look right: swapped data under a manifest that was made to fit.

A folder is changed and sealed anew by a few lines of this module's own, so that every digest is right: plain `verify` compares a
folder with its manifest alone, and cannot see such a fault. The source can.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from blake3 import blake3
from click.testing import CliRunner, Result

import made
from closed_form import Form
from sm70_convert import manifest
from sm70_convert.cli import main
from sm70_convert.console import Console

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, SIZES = 64, 128, 4, 2, (1, 2)
FORMATS = {
    "awq": (made.awq, Form("awq-half2", True, HIDDEN, INTERMEDIATE, 32, 2), 4),
    "nvfp4": (made.nvfp4, Form("nvfp4-fp16", False, HIDDEN, INTERMEDIATE, 16, 2), 2),
}  # a checkpoint, the form of its TP 2 banks, the bytes of a scale
WHAT = "expert {} is not what its source makes"
# One expert of every tensor of a bank.
Bank: TypeAlias = dict[str, list[bytearray]]
ALL = ("w13_tm_weight", "w13_tm_scales", "w2_tm_weight", "w2_tm_scales")


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.stderr)
    return result


def path_of(tp_size: int, rank: int, layer: int) -> str:
    return f"sm70/tp{tp_size}/rank{rank}/layer-{layer:05d}.safetensors"


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


@dataclass
class Folder:
    """A sealed folder to be changed, its source, and its format's name."""

    root: Path
    source: Path
    name: str

    @property
    def form(self) -> Form:
        return FORMATS[self.name][1]

    @property
    def scale_bytes(self) -> int:
        return FORMATS[self.name][2]

    def layout_of(self, path: str) -> tuple[bytes, dict[str, tuple[int, int]]]:
        """The bytes of a safetensors header, and where each tensor lies in the file."""
        data = (self.root / path).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        spans = {n: e["data_offsets"] for n, e in header.items() if n != "__metadata__"}
        return data[:start], {name: (start + first, start + last) for name, (first, last) in spans.items()}

    def bank(self, path: str) -> Bank:
        data, (_, spans) = (self.root / path).read_bytes(), self.layout_of(path)
        return {
            name: [
                bytearray(data[i : i + (last - first) // EXPERTS])
                for i in range(first, last, (last - first) // EXPERTS)
            ]
            for name, (first, last) in spans.items()
        }

    def put(self, path: str, bank: Bank) -> None:
        """Other data under the same header."""
        header, spans = self.layout_of(path)
        data = header + b"".join(b"".join(bank[name]) for name in spans)
        assert len(data) == (self.root / path).stat().st_size
        (self.root / path).write_bytes(data)

    def reseal(self) -> None:
        """Makes every digest of the manifest right for what the files hold now."""
        document = json.loads((self.root / "sm70/manifest.json").read_bytes())
        for record in document["banks"] + document["passthrough"]:
            data = (self.root / record["path"]).read_bytes()
            record["bytes"], record["digest"] = len(data), digest(data)
            if record["path"].endswith(".safetensors"):
                header, spans = self.layout_of(record["path"])
                record["tensors"] = {name: digest(data[first:last]) for name, (first, last) in spans.items()}
                parts = [digest(header), *record["tensors"].values()]
                record["digest"] = digest(b"".join(bytes.fromhex(part) for part in parts))
        del document["manifest_digest"]
        whole = json.dumps(document, sort_keys=True, separators=(",", ":"))
        document["manifest_digest"] = digest(whole.encode())
        (self.root / "sm70/manifest.json").write_text(json.dumps(document))

    def found(self, *options: object) -> set[tuple[str, str, int, int, str]]:
        """(tensor, file, layer, rank, message) of all that verify --source finds; there must be something."""
        error = json.loads(run("verify", self.root, "--source", self.source, "--json", *options, code=6).stdout)[
            "error"
        ]
        problems = [
            tuple(p.get(key) for key in ("tensor", "file", "layer", "rank", "message")) for p in error["problems"]
        ]
        assert error["total"] == len(problems) == len(set(problems))
        return set(problems)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    root, folders = tmp_path_factory.mktemp("sealed"), {}
    for name, (make, *_) in FORMATS.items():
        checkpoint = make(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE)
        folders[name] = Folder(root / f"{name}-out", checkpoint.write(root / name), name)
        run(folders[name].source, "--out", folders[name].root, *(a for size in SIZES for a in ("--tp-size", size)))
    return folders


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, sealed: dict[str, Folder], tmp_path: Path) -> Folder:
    """One that a test may change."""
    clean = sealed[request.param]
    shutil.copytree(clean.root, tmp_path / "out")
    return Folder(tmp_path / "out", clean.source, clean.name)


def in_bank(tp_size: int, rank: int, layer: int, experts: Sequence[int], tensors: Sequence[str] = ALL) -> set[Any]:
    """What must be found in one bank."""
    path = path_of(tp_size, rank, layer)
    return {(tensor, path, layer, rank, WHAT.format(expert)) for expert in experts for tensor in tensors}


def exchange_files(folder: Folder, one: str, other: str) -> None:
    first, second = folder.bank(one), folder.bank(other)
    folder.put(one, second)
    folder.put(other, first)


def exchange_nibbles(bank: Bank, expert: int, one: tuple[str, int, int], other: tuple[str, int, int]) -> None:
    (tensor, a, shift_a), (_, b, shift_b) = one, other
    data = bank[tensor][expert]
    x, y = data[a] >> shift_a & 15, data[b] >> shift_b & 15
    data[a] = data[a] & (0xF0 >> shift_a) | y << shift_a
    data[b] = data[b] & (0xF0 >> shift_b) | x << shift_b


def exchange_scales(folder: Folder, bank: Bank, expert: int, one: tuple[str, int], other: tuple[str, int]) -> None:
    size, data = folder.scale_bytes, bank[one[0]][expert]
    a, b = one[1] * size, other[1] * size
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


# The faults. Each changes a folder and says all that must be found. A form's addresses begin with rank 0, which is used here.


def two_experts(folder: Folder) -> set[Any]:
    bank = folder.bank(path_of(2, 1, 1))
    for experts in bank.values():
        experts[1], experts[3] = experts[3], experts[1]
    folder.put(path_of(2, 1, 1), bank)
    return in_bank(2, 1, 1, [1, 3])


def one_expert_of_one_tensor(folder: Folder) -> set[Any]:
    bank = folder.bank(path_of(1, 0, 0))
    bank["w2_tm_weight"][2] = bank["w2_tm_weight"][0]
    folder.put(path_of(1, 0, 0), bank)
    return in_bank(1, 0, 0, [2], ["w2_tm_weight"])


def gate_and_up(folder: Folder) -> set[Any]:
    bank, form = folder.bank(path_of(2, 0, 1)), folder.form
    for n in range(form.local):
        for k in range(HIDDEN):
            exchange_nibbles(bank, 3, form.weight("gate", k, n), form.weight("up", k, n))
        for k in range(0, HIDDEN, form.group):
            exchange_scales(folder, bank, 3, form.entry("gate", k, n), form.entry("up", k, n))
    folder.put(path_of(2, 0, 1), bank)
    return in_bank(2, 0, 1, [3], ["w13_tm_weight", "w13_tm_scales"])


def two_ranks(folder: Folder) -> set[Any]:
    exchange_files(folder, path_of(2, 0, 0), path_of(2, 1, 0))
    return in_bank(2, 0, 0, range(EXPERTS)) | in_bank(2, 1, 0, range(EXPERTS))


def two_layers(folder: Folder) -> set[Any]:
    exchange_files(folder, path_of(2, 1, 0), path_of(2, 1, 1))
    return in_bank(2, 1, 0, range(EXPERTS)) | in_bank(2, 1, 1, range(EXPERTS))


def one_group(folder: Folder) -> set[Any]:
    bank, form = folder.bank(path_of(2, 0, 0)), folder.form
    before = bytes(bank["w2_tm_scales"][0])
    exchange_scales(folder, bank, 0, form.entry("down", 0, 5), form.entry("down", form.group, 5))
    assert bank["w2_tm_scales"][0] != before
    folder.put(path_of(2, 0, 0), bank)
    return in_bank(2, 0, 0, [0], ["w2_tm_scales"])


def two_columns(folder: Folder) -> set[Any]:
    bank, form = folder.bank(path_of(2, 0, 0)), folder.form
    for k in range(form.local):
        exchange_nibbles(bank, 2, form.weight("down", k, 7), form.weight("down", k, 40))
    for k in range(0, form.local, form.group):
        exchange_scales(folder, bank, 2, form.entry("down", k, 7), form.entry("down", k, 40))
    folder.put(path_of(2, 0, 0), bank)
    return in_bank(2, 0, 0, [2], ["w2_tm_weight", "w2_tm_scales"])


def two_weights(folder: Folder) -> set[Any]:
    bank, form = folder.bank(path_of(2, 0, 1)), folder.form
    places = [form.weight("gate", k, 0) for k in range(HIDDEN)]
    values = [bank[t][1][at] >> shift & 15 for t, at, shift in places]
    other = next(k for k in range(HIDDEN) if values[k] != values[0])
    exchange_nibbles(bank, 1, places[0], places[other])
    folder.put(path_of(2, 0, 1), bank)
    return in_bank(2, 0, 1, [1], ["w13_tm_weight"])


def of_another_tp_size(folder: Folder) -> set[Any]:
    """Rank 0 of 2 holds the first half of what rank 0 of 1 does: right for no tensor, since ranks are no halves of it."""
    whole = folder.bank(path_of(1, 0, 0))
    halves = {name: [data[: len(data) // 2] for data in experts] for name, experts in whole.items()}
    before = folder.bank(path_of(2, 0, 0))
    folder.put(path_of(2, 0, 0), halves)
    # Where gate and up alternate, the first tiles of w13 are rank 0's own; down's first groups always are.
    same = {name for name in ALL if halves[name] == before[name]}
    assert same == ({"w13_tm_weight", "w2_tm_scales"} if folder.name == "awq" else {"w2_tm_scales"})
    return in_bank(2, 0, 0, range(EXPERTS), [name for name in ALL if name not in same])


FAULTS: list[Callable[[Folder], set[Any]]] = [
    two_experts,
    one_expert_of_one_tensor,
    gate_and_up,
    two_ranks,
    two_layers,
    one_group,
    two_columns,
    two_weights,
    of_another_tp_size,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_swapped_is_named_by_tensor_layer_rank_and_expert(
    folder: Folder, fault: Callable[[Folder], set[Any]]
) -> None:
    expected = fault(folder)
    folder.reseal()
    run("verify", folder.root)  # which cannot tell: everything is as the manifest says
    run("verify", folder.root, "--quick")
    assert folder.found() == expected
    for rank in range(2):
        of_rank = {problem for problem in expected if problem[3] == rank}
        if of_rank:
            assert folder.found("--rank", rank) == of_rank
        else:
            run("verify", folder.root, "--source", folder.source, "--rank", rank)


def test_a_person_reads_where_it_is(folder: Folder) -> None:
    one_group(folder)
    folder.reseal()
    assert run("verify", folder.root, "--source", folder.source, code=6).stderr == (
        "error: w2_tm_scales (sm70/tp2/rank0/layer-00000.safetensors) rank 0: expert 0 is not what its source makes\n"
        "next: restore the file from a good copy, or convert again with --overwrite\n"
    )


def test_a_swap_without_a_new_seal_is_found_by_its_digests(folder: Folder) -> None:
    two_ranks(folder)
    assert "has other bytes than the manifest says" in run("verify", folder.root, code=6).stderr
    assert "has other bytes than the manifest says" in run(
        "verify", folder.root, "--source", folder.source, code=6
    ).stderr  # fmt: skip


# What passes through


def flip_norm(folder: Folder) -> Any:
    _, spans = folder.layout_of("model.safetensors")
    data = bytearray((folder.root / "model.safetensors").read_bytes())
    data[spans["model.norm.weight"][0]] ^= 1
    (folder.root / "model.safetensors").write_bytes(data)
    return ("model.norm.weight", "model.safetensors", None, None, "is not the source's tensor")


def other_dtype(folder: Folder) -> Any:
    data = (folder.root / "model.safetensors").read_bytes()
    (folder.root / "model.safetensors").write_bytes(data.replace(b'"BF16"', b'"F16" ', 1))
    return (None, "model.safetensors", None, None, "has another header than its source makes")


def replaced(name: str, old: bytes, new: bytes, message: str, folder: Folder) -> Any:
    data = (folder.root / name).read_bytes()
    assert old in data
    (folder.root / name).write_bytes(data.replace(old, new, 1))
    return (None, name, None, None, message)


NOT_MADE = "is not what its source makes"
PASSED: dict[str, Callable[[Folder], Any]] = {
    "tensor": flip_norm,
    "dtype": other_dtype,
    "file": partial(replaced, "generation_config.json", b"true", b"null", "is not the source's file"),
    "config": partial(replaced, "config.json", b'"num_experts_per_tok": 2', b'"num_experts_per_tok": 3', NOT_MADE),
    "index": partial(
        replaced, "model.safetensors.index.json", b'"model.norm.weight"', b'"model.norm.height"', NOT_MADE
    ),
    "sentinel": partial(replaced, "sm70-sentinel.safetensors", b"sm70_prepared", b"sm71_prepared", NOT_MADE),
}


@pytest.mark.parametrize("name", PASSED)
def test_what_passes_through_is_compared_with_the_source_whole(folder: Folder, name: str) -> None:
    expected = PASSED[name](folder)
    folder.reseal()
    run("verify", folder.root)
    assert folder.found("--sample", 1) == folder.found() == {expected}


# A sample


def test_a_sample_finds_what_is_wrong_with_its_experts_and_nothing_else(folder: Folder) -> None:
    """K experts of every layer, the same ones each time: a fault in another expert stays unseen."""
    path = path_of(2, 1, 1)
    clean = folder.bank(path)
    found = {}
    for sample in (1, 3, EXPERTS):
        for expert in range(EXPERTS):
            bank = {name: list(experts) for name, experts in clean.items()}
            bank["w2_tm_scales"][expert] = bank["w2_tm_scales"][expert][::-1]
            folder.put(path, bank)
            folder.reseal()
            result = CliRunner().invoke(
                main, ["verify", str(folder.root), "--source", str(folder.source), "--sample", str(sample)]
            )
            assert result.exit_code in (0, 6)
            found[sample, expert] = result.exit_code == 6
            if result.exit_code == 6:
                assert folder.found("--sample", sample) == in_bank(2, 1, 1, [expert], ["w2_tm_scales"])
        assert sum(found[sample, expert] for expert in range(EXPERTS)) == sample


@pytest.mark.parametrize("fault", [two_ranks, two_layers, of_another_tp_size], ids=lambda fault: fault.__name__)
def test_a_sample_of_one_finds_a_wrong_file(folder: Folder, fault: Callable[[Folder], set[Any]]) -> None:
    """Whatever moved whole banks shows in every expert."""
    expected = fault(folder)
    folder.reseal()
    found = folder.found("--sample", 1)
    assert found < expected
    assert {problem[:4] for problem in found} == {problem[:4] for problem in expected}


# Counts


@pytest.mark.parametrize("options", [[], ["--rank", 0], ["--rank", 1], ["--sample", 3], ["--sample", 1, "--rank", 1]])
def test_the_progress_adds_up_and_the_counts_are_of_what_was_compared(
    folder: Folder, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[list[int]] = []

    @contextmanager
    def bar(*, total: int, **_: object) -> Iterator[SimpleNamespace]:
        bars.append([total])
        yield SimpleNamespace(update=bars[-1].append, set_postfix_str=lambda _: None)

    monkeypatch.setattr("tqdm.tqdm", bar)
    monkeypatch.setattr(Console, "shows_progress", property(lambda _: True))
    result = run("verify", folder.root, "--source", folder.source, *options, "--json")
    assert len(bars) == 2
    for total, *steps in bars:
        assert total == sum(steps) > 0
    rank = options[options.index("--rank") + 1] if "--rank" in options else None
    sample = options[options.index("--sample") + 1] if "--sample" in options else EXPERTS
    of_ranks = {f"rank{r}" for r in (range(2) if rank is None else [rank])}
    files = [
        path
        for path in folder.root.rglob("*")
        if path.is_file() and (path.parent == folder.root or path.parent.name in of_ranks)
    ]
    document = json.loads(result.stdout)
    banks = sum(path.parent.name.startswith("rank") for path in files)
    assert document["files"] == len(files)
    assert document["bytes"] == sum(path.stat().st_size for path in files)
    assert document["experts"] == sample * LAYERS
    assert document["tensors"] == sample * banks * len(ALL)


def test_the_manifest_is_read_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    read = manifest.read_small
    monkeypatch.setattr(manifest, "read_small", lambda *a: calls.append(a) or read(*a))
    run("verify", folder.root, "--source", folder.source, "--against", folder.root)
    assert (
        calls == [(folder.root / "sm70/manifest.json", "sm70/manifest.json")] * 2
    )  # once more as what is compared with
