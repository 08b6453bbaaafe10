"""Bad checkpoints and output folders beyond the table of them: many problems at once, and folders in every state."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from click.testing import Result
from safetensors.numpy import load_file

from bad_inputs import (
    BANK,
    FORMATS,
    NAN,
    SCALES,
    After,
    assert_nothing_sealed,
    awq_scale,
    contents,
    interrupted,
    lines,
    nvfp4_code,
    run,
    seal,
    temporary_files,
)
from made import EXPERTS, PROJECTIONS, SINGLE, awq, edited, nvfp4, tensor


def test_the_tp_sizes_that_a_refusal_names_do_work(tmp_path: Path) -> None:
    for name, make, sizes in (("awq", awq, (1, 2)), ("nvfp4", nvfp4, (1, 2, 4))):
        source = make().write(tmp_path / name)
        document = seal(source, tmp_path / f"{name}-out", *(a for size in sizes for a in ("--tp-size", size)))
        assert document["tp_sizes"] == list(sizes)


def test_what_allow_nonfinite_keeps_is_what_the_runtime_would_make(tmp_path: Path) -> None:
    source = tmp_path / "awq"
    made = awq()
    awq_scale(NAN)(made)
    seal(made.write(source), tmp_path / "awq-out", "--allow-nonfinite", "--interleave", "off")
    words = load_file(tmp_path / "awq-out" / BANK)["w13_tm_scales"].view(np.uint32)
    assert words[2, 1, 64 + 5] & 0xFFFF == 0x7E00  # the scale as stored
    assert words[2, 1, 64 + 5] >> 16 == 0x7FFF  # and its product, NaN as the GPU writes it
    assert np.isfinite(words.view(np.float16)).sum() == words.size * 2 - 2

    made = nvfp4()
    nvfp4_code(0xFF)(made)
    seal(made.write(tmp_path / "nvfp4"), tmp_path / "nvfp4-out", "--allow-nonfinite")
    scales = load_file(tmp_path / "nvfp4-out" / BANK)["w2_tm_scales"].view(np.uint16)
    assert scales[2, 1, 3] == 0x7FFF
    assert np.isfinite(scales.view(np.float16)).sum() == scales.size - 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_scale_stops_its_layer_and_keeps_those_before(name: str, tmp_path: Path) -> None:
    made, out = FORMATS[name](layers=2), tmp_path / "out"
    bad = f"model.layers.1.mlp.experts.3.down_proj.{SCALES[name]}"
    made.set_item(bad, 0, NAN if name == "awq" else b"\x7f")
    source = made.write(tmp_path / "source")
    result = run(source, out)
    assert result.exit_code == 3
    assert [line.split(" (")[0] for line in lines(result)] == [f"error: {bad}"]
    assert_nothing_sealed(out)
    assert sorted(p.name for p in (out / "sm70/tp1/rank0").iterdir()) == ["layer-00000.safetensors"]
    document = seal(source, out, "--allow-nonfinite")
    assert (document["layers_resumed"], document["layers_prepared"]) == ([0], [1])


# All problems at once.
def shown(problems: list[dict[str, Any]]) -> list[str]:
    return [
        f"error: {p['tensor']} ({p['file']}): {p['message']}: expected {p['expected']}, found {p['actual']}"
        for p in problems
    ]


def test_thirteen_wrong_tensors_are_ten_lines_and_a_count(tmp_path: Path) -> None:
    made = awq()
    wrong = [f"{EXPERTS}.{e}.{p}_proj.scales" for p in PROJECTIONS for e in range(4)] + [f"{EXPERTS}.2.up_proj.qweight"]
    for name in wrong:
        made.change(name, shape=(3, 8))
    source, out = made.write(tmp_path / "source"), tmp_path / "out"
    result = run(source, out)
    assert result.exit_code == 3
    error = json.loads(run(source, out, "--json").stdout)["error"]
    assert (error["kind"], error["exit_code"], error["total"]) == ("checkpoint", 3, 13)
    assert sorted(p["tensor"] for p in error["problems"]) == sorted(wrong)
    assert lines(result) == [*shown(error["problems"][:10]), "... and 3 more problems like these"]
    assert not out.exists()


def test_problems_of_many_kinds_come_at_once_and_the_lowest_code_wins(tmp_path: Path) -> None:
    made = awq(layers=2)
    made.change(f"{EXPERTS}.0.down_proj.qzeros", dtype="I64")
    made.change(f"{EXPERTS}.1.down_proj.qweight", shape=(8, 64))
    made.drop(f"{EXPERTS}.3.up_proj.scales")
    made.add(f"{EXPERTS}.2.up_proj.g_idx", tensor("I32", (64,)))
    made.drop_expert(3, layer=1)
    made.add("model.layers.1.mlp.experts.0.gate_proj.nvfp4_csf", tensor("U8", (4,)))
    made.unquantise("model.layers.1.mlp.experts.1.up_proj")
    source, out = made.write(tmp_path / "source"), tmp_path / "out"
    result = run(source, out, "--tp-size", 4)
    assert result.exit_code == 3
    assert [line.removeprefix("error: ").replace(f" ({SINGLE})", "") for line in lines(result)] == [
        f"{EXPERTS}.3.up_proj.scales: is missing",
        f"{EXPERTS}.1.down_proj.qweight: has the wrong shape for this model: expected [64, 8], found [8, 64]",
        f"{EXPERTS}.0.down_proj.qzeros: has the wrong dtype: expected I32, found I64",
        "model.layers.1.mlp.experts.3.gate_proj.qweight: expert 3 of 4 has no tensors",
        f"{EXPERTS}.2.up_proj.g_idx: is no part of an expert in awq that can be prepared",
        "model.layers.1.mlp.experts.1.up_proj.weight: is not quantised (BF16), but other experts of its layer are",
        "model.layers.1.mlp.experts.0.gate_proj.nvfp4_csf: is no part of an expert in awq that can be prepared",
        (
            f"{EXPERTS}.0.gate_proj.qweight: TP size 4 is not possible: "
            "each rank would hold 16 of the 64 intermediate channels, not a multiple of the group size 32"
        ),
    ]
    assert not out.exists()


def test_of_very_many_problems_all_are_counted_and_a_hundred_kept(tmp_path: Path) -> None:
    made = awq(experts=40)
    for name in made.tensors:
        if name.endswith(".scales"):
            made.change(name, dtype="F32")
    source = made.write(tmp_path / "source")
    error = json.loads(run(source, tmp_path / "out", "--json").stdout)["error"]
    assert (error["total"], len(error["problems"])) == (120, 100)
    assert lines(run(source, tmp_path / "out"))[-1] == "... and 110 more problems like these"


# 9. The output folder.
@pytest.fixture
def source(tmp_path: Path) -> Path:
    return awq().write(tmp_path / "source")


def assert_output_refused(result: Result, *errors: str) -> None:
    assert lines(result) == [f"error: {e}" for e in errors]
    assert result.exit_code == 5
    assert result.stdout == ""


@pytest.mark.parametrize("where", ["source", "source/out", "source/a/b", "."])
def test_9_an_output_that_overlaps_the_checkpoint_is_refused(where: str, source: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    out = tmp_path / where
    assert_output_refused(run(source, out), f"{out.resolve()}: output and checkpoint overlap")
    assert_output_refused(run(source, out, "--dry-run"), f"{out.resolve()}: output and checkpoint overlap")
    assert contents(tmp_path) == before
    assert not (source / "a").exists()


def test_9_an_output_that_leads_into_the_checkpoint_by_a_symlink_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    out = tmp_path / "link" / "out"
    assert_output_refused(run(source, out), f"{source.resolve() / 'out'}: output and checkpoint overlap")
    assert not (source / "out").exists()


def test_9_a_disk_with_one_byte_too_few_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = json.loads(run(source, tmp_path / "out", "--dry-run", "--json").stdout)["output_bytes"]

    def with_free(count: int) -> None:
        state = list(os.statvfs("/"))
        state[1], state[4] = 1, count  # f_frsize, f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(state))

    with_free(needed - 1)
    assert_output_refused(
        run(source, tmp_path / "out"),
        f"{tmp_path}: has not enough free space: expected {needed} bytes free, found {needed - 1}",
    )
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    with_free(needed)
    seal(source, tmp_path / "out")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion of `source` gives."""
    folder = tmp_path_factory.mktemp("clean")
    seal(awq().write(folder / "source"), folder / "out")
    return contents(folder / "out")


@pytest.mark.parametrize(
    ("function", "call"),
    [
        *(("pwrite", call) for call in (1, 2, 3, 10, *range(18, 31))),
        *(("fsync", call) for call in range(1, 11)),  # some disks tell only then that they are full
        *(("rename", call) for call in range(1, 10)),
    ],
)
def test_9_a_disk_that_fills_while_it_is_written_leaves_nothing_sealed(
    function: str,
    call: int,
    source: Path,
    tmp_path: Path,
    clean: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The n-th call and all after it fail: in the journal, a bank, what passes through, the manifest."""
    real, calls = getattr(os, function), 0

    def full(*args: Any, **options: Any) -> Any:
        nonlocal calls
        # Folders are synced after a rename, when the file is there.
        calls += function != "fsync" or stat.S_ISREG(os.fstat(args[0]).st_mode)
        if calls >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(os, function, full)
    out = tmp_path / "out"
    result = run(source, out)
    assert calls >= call
    assert result.exit_code == 5
    assert [line.split(": ", 2)[2] for line in lines(result)] == ["cannot be written: No space left on device"]
    assert lines(result, "next: ") == [
        "next: free some space (or mend the disk), then run the same command again: it resumes"
    ]
    assert not (out / "sm70" / "manifest.json").exists()
    assert temporary_files(out) == []
    monkeypatch.undo()
    seal(source, out)
    assert contents(out) == clean


@pytest.mark.skipif(os.geteuid() == 0, reason="a superuser may write anywhere")
def test_9_a_read_only_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    assert_output_refused(run(source, tmp_path / "locked" / "out"), f"{tmp_path / 'locked'}: is not writable")


def test_9_an_output_below_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    out = tmp_path / "file" / "out"
    assert_output_refused(run(source, out), f"{out}: cannot be created: Not a directory")
    out = tmp_path / "file"
    assert_output_refused(run(source, out), f"{out}: cannot be read as a folder: Not a directory")
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", SINGLE, "sm70/other.txt", "sm70/tp1/rank0/layer-00000.safetensors"]
)
def test_9_a_folder_with_contents_of_others_is_refused_even_with_overwrite(
    name: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_bytes(b"mine")
    message = f"{out}: is not empty, and holds no manifest or journal of this tool"
    assert_output_refused(run(source, out), message)
    assert_output_refused(run(source, out, "--overwrite"), f"{message} that would say what --overwrite may remove")
    assert contents(out) == {name: b"mine"}


def other_source(source: Path) -> None:
    """The same checkpoint with another config.json."""
    with edited(source / "config.json") as config:
        config["vocab_size"] = 9


OTHER_PLANS: dict[str, tuple[After, tuple[object, ...], str]] = {
    "config": (other_source, (), "source.config"),
    "interleave": (lambda _: None, ("--interleave", "off"), "layout.interleave_gate_up"),
    "layout": (lambda _: None, ("--layout", "awq-compact"), "layout.name"),
    "hash": (lambda _: None, ("--hash", "sha256"), "hash"),
}


@pytest.mark.parametrize("name", OTHER_PLANS)
def test_9_a_sealed_folder_of_another_plan_is_refused_and_kept(name: str, source: Path, tmp_path: Path) -> None:
    change, args, field = OTHER_PLANS[name]
    out = tmp_path / "out"
    seal(source, out)
    before = contents(out)
    change(source)
    result = run(source, out, *args)
    assert result.exit_code == 5
    assert [line.split(": expected ")[0] for line in lines(result)] == [
        f"error: sm70/manifest.json: belongs to another plan: {field} differs"
    ]
    assert lines(result, "next: ") == ["next: use another --out, or --overwrite to start over"]
    assert contents(out) == before
    seal(source, out, *args, "--overwrite")
    seal(source, tmp_path / "clean", *args)
    assert contents(out) == contents(tmp_path / "clean")


@pytest.mark.parametrize("name", [*OTHER_PLANS, "tp-sizes"])
def test_9_an_unfinished_folder_of_another_plan_is_refused(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two differences the first by name is told: another hash changes every digest, too.
    change, args, field = {**OTHER_PLANS, "tp-sizes": (lambda _: None, ("--tp-size", 2), "tp_sizes")}[name]
    out = tmp_path / "out"
    interrupted(source, out, monkeypatch)
    before = contents(out)
    change(source)
    result = run(source, out, *args)
    assert result.exit_code == 5
    assert [line.split(": expected ")[0] for line in lines(result)] == [
        f"error: sm70/journal.jsonl: belongs to another plan: {field} differs"
    ]
    assert_nothing_sealed(out)
    assert contents(out) == before
    seal(source, out, *args, "--overwrite")


def test_9_an_unfinished_folder_of_a_touched_shard_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, monkeypatch)
    os.utime(source / SINGLE, ns=(1, 1))
    result = run(source, out)
    assert result.exit_code == 5
    assert lines(result)[0].startswith(f"error: sm70/journal.jsonl: belongs to another plan: mtimes.{SINGLE} differs")
    assert_nothing_sealed(out)


def digested(document: dict[str, Any]) -> bytes:
    """A manifest's bytes with a digest that is right for them."""
    document.pop("manifest_digest", None)
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**document, "manifest_digest": blake3(data).hexdigest()}).encode()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_version", 2, "other format version: expected 1, found 2"),
        ("format_version", None, "other format version: expected 1, found None"),
        ("format_version", "1", "other format version: expected 1, found '1'"),
        ("tool_version", "0.0.9", "belongs to another plan: tool_version differs: expected 0.0.9, found {version}"),
    ],
)
def test_9_a_sealed_folder_of_another_version_is_refused_and_kept(
    field: str, value: object, message: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    seal(source, out)
    path = out / "sm70" / "manifest.json"
    document = json.loads(path.read_bytes())
    version = document["tool_version"]
    assert json.loads(digested(dict(document))) == document  # the digest here is the tool's
    document[field] = value
    path.write_bytes(digested(document))
    before = contents(out)
    for args in ((), ("--tp-size", 2)):
        assert_output_refused(run(source, out, *args), f"sm70/manifest.json: {message.format(version=version)}")
        assert contents(out) == before


def test_9_a_sealed_folder_whose_manifest_was_edited_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seal(source, out)
    with edited(out / "sm70" / "manifest.json") as document:
        document["tool_version"] = "0.0.9"
    before = contents(out)
    message = "sm70/manifest.json: was altered or damaged: its own digest does not match"
    assert_output_refused(run(source, out), message)
    result = run(source, out, "--overwrite")
    assert_output_refused(result, f"{out}: --overwrite cannot tell which files are ours: {message}")
    assert contents(out) == before


@pytest.mark.parametrize(("field", "value"), [("format_version", 2), ("tool_version", "0.0.9")])
def test_9_an_unfinished_folder_of_another_version_is_refused(
    field: str, value: object, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    journal = interrupted(source, out, monkeypatch)
    head = json.loads(journal.read_bytes().split(b"\n")[0])
    found = head["plan"][field]
    head["plan"][field] = value
    journal.write_bytes(json.dumps(head).encode() + b"\n")
    assert_output_refused(
        run(source, out),
        f"sm70/journal.jsonl: belongs to another plan: {field} differs: expected {value}, found {found}",
    )
    assert_nothing_sealed(out)


@pytest.mark.parametrize(
    "data", [b"", b"{}\n", b"not json\n", b'{"plan": [], "source": "", "layers": "0", "outputs": ["../x"]}\n']
)
def test_9_a_damaged_journal_is_refused(
    data: bytes, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, monkeypatch).write_bytes(data)
    assert_output_refused(run(source, out), "sm70/journal.jsonl: is damaged, or no journal of this tool")
    assert_nothing_sealed(out)


def test_9_a_prepared_folder_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    seal(source, tmp_path / "out")
    result = run(tmp_path / "out", tmp_path / "again")
    assert result.exit_code == 4
    assert lines(result) == [f"error: {tmp_path / 'out'}: is a prepared folder already"]
    assert not (tmp_path / "again").exists()


def test_a_checkpoint_that_changes_while_it_is_converted_is_not_sealed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sm70_convert.seal as module

    write = module.write_passthrough

    def then_touch(*args: Any) -> Any:
        yield from write(*args)
        os.utime(source / SINGLE, ns=(1, 1))

    monkeypatch.setattr(module, "write_passthrough", then_touch)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3
    assert lines(result)[0].startswith(f"error: {SINGLE}: changed while it was converted: expected ")
    assert not (tmp_path / "out" / "sm70" / "manifest.json").exists()
    assert temporary_files(tmp_path / "out") == []


def test_a_source_file_that_prepared_folders_use_themselves_is_refused(tmp_path: Path) -> None:
    made = awq()
    made.others["SHA256SUMS"] = b""
    source = made.write(tmp_path / "source")
    (source / "sm70").mkdir()
    (source / "sm70" / "notes.txt").write_bytes(b"")
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3
    what = "has a name that prepared folders use for themselves"
    assert lines(result) == [f"error: SHA256SUMS: {what}", f"error: sm70/notes.txt: {what}"]
    assert not (tmp_path / "out").exists()
