"""What a damaged or hostile output folder gets: found, named, never sealed anew, never written through."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from made import awq
from sm70_convert.cli import main

DATA = Path(__file__).parent / "data"
AWQ, NVFP4 = DATA / "gptqmodel-awq-gemm-g32-qwen3moe", DATA / "modelopt-w4a16nvfp4-qwen3moe"
BANK = "sm70/tp2/rank0/layer-00000.safetensors"


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.stderr)
    return result


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    run(AWQ, "--out", tmp_path / "out", "--tp-size", 2)
    return tmp_path / "out"


@pytest.fixture
def part(tmp_path: Path) -> Path:
    run(AWQ, "--out", tmp_path / "out", "--layers", 0)
    return tmp_path / "out"


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing bank": (BANK, lambda out: (out / BANK).unlink()),
    "short bank": (BANK, lambda out: os.truncate(out / BANK, 1000)),
    "missing file": ("tokenizer.json", lambda out: (out / "tokenizer.json").unlink()),
}


@pytest.mark.parametrize("tp_size", [2, 4], ids=["again", "one more size"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_neither_called_done_nor_sealed_anew(sealed: Path, name: str, tp_size: int) -> None:
    path, damage = DAMAGE[name]
    damage(sealed)
    before = (sealed / "sm70/manifest.json").read_bytes()
    result = run(AWQ, "--out", sealed, "--tp-size", tp_size, code=6)
    assert f"error: {path}: " in result.stderr
    assert "next: restore the file from a good copy, or convert again with --overwrite" in result.stderr
    assert (sealed / "sm70/manifest.json").read_bytes() == before
    run(AWQ, "--out", sealed, "--tp-size", 2, "--overwrite")
    run("verify", sealed)


def test_a_refused_addition_leaves_the_sealed_folder_as_it_was(sealed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(AWQ, other)
    data = bytearray((other / "model.safetensors").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    first = 8 + int.from_bytes(data[:8], "little")
    data[first + header["model.layers.0.mlp.experts.3.up_proj.qweight"]["data_offsets"][0]] ^= 1
    (other / "model.safetensors").write_bytes(data)
    result = run(other, "--out", sealed, "--tp-size", 4, code=5)
    assert (
        "model.layers.0.mlp.experts.{expert}.up_proj.qweight: differs from what this folder was made of"
        in result.stderr
    )
    assert not (sealed / "sm70/tp4").exists() or not any((sealed / "sm70/tp4").rglob("*.safetensors"))
    run(AWQ, "--out", sealed, "--tp-size", 4)
    run("verify", sealed, "--source", AWQ)


@pytest.mark.parametrize("folder", ["sm70/tp4", "sm70/tp4/rank1"])
def test_nothing_is_written_through_a_symlink_in_the_folder(sealed: Path, tmp_path: Path, folder: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (sealed / folder).parent.mkdir(exist_ok=True)
    (sealed / folder).symlink_to(elsewhere)
    result = run(AWQ, "--out", sealed, "--tp-size", 4, code=5)
    assert f"{folder}: is not a real folder" in result.stderr
    assert not any(elsewhere.iterdir())


def test_a_bank_folder_behind_a_symlink_does_not_verify(sealed: Path, tmp_path: Path) -> None:
    (sealed / "sm70/tp2").rename(tmp_path / "tp2")
    (sealed / "sm70/tp2").symlink_to(tmp_path / "tp2")
    assert "error: sm70/tp2: is a symlink, which a bank or a folder never is" in run("verify", sealed, code=6).stderr


def test_a_folder_of_other_files_behind_a_symlink_does_not_verify(tmp_path: Path) -> None:
    source, out = awq().write(tmp_path / "source"), tmp_path / "out"
    (source / "assets").mkdir()
    (source / "assets/notes.txt").write_text("notes")
    run(source, "--out", out)
    run("verify", out)
    (out / "assets").rename(tmp_path / "assets")
    (out / "assets").symlink_to(tmp_path / "assets")
    assert "error: assets: is a symlink, which a bank or a folder never is" in run("verify", out, code=6).stderr


def test_a_stray_file_is_not_sealed_in(part: Path) -> None:
    (part / "junk.bin").touch()
    result = run("seal", part, code=5)
    assert "holds files that are no part of it: junk.bin" in result.stderr
    (part / "junk.bin").unlink()
    run("seal", part)
    run("verify", part)


def test_a_journal_record_without_its_banks_is_not_sealed(part: Path) -> None:
    journal = part / "sm70/journal-0.jsonl"
    head, line, _ = journal.read_text().split("\n")
    journal.write_text(f"{head}\n{json.dumps({**json.loads(line), 'banks': []})}\n")
    assert "does not name its banks" in run("seal", part, code=6).stderr
    run(AWQ, "--out", part, "--layers", 0)
    run("seal", part)
    run("verify", part)


@pytest.mark.parametrize("kind", ["fifo", "folder", "/dev/zero"])
def test_a_journal_that_is_no_file_is_refused_at_once(part: Path, kind: str) -> None:
    journal = part / "sm70/journal-0.jsonl"
    journal.unlink()
    if kind == "fifo":
        os.mkfifo(journal)
    elif kind == "folder":
        journal.mkdir()
    else:
        journal.symlink_to(kind)
    assert "sm70/journal-0.jsonl: is damaged, or no journal of this tool" in run("seal", part, code=5).stderr


@pytest.mark.parametrize("field", ["tp_sizes", "layout"])
def test_a_journal_without_its_plan_is_refused(part: Path, field: str) -> None:
    journal = part / "sm70/journal-0.jsonl"
    head, rest = journal.read_text().split("\n", 1)
    document = json.loads(head)
    del document["plan"][field]
    journal.write_text(f"{json.dumps(document)}\n{rest}")
    assert "is damaged, or no journal of this tool" in run("seal", part, code=5).stderr


def test_sums_are_part_of_a_sha256_folder_alone(sealed: Path) -> None:
    (sealed / "SHA256SUMS").touch()
    assert "error: SHA256SUMS: is not named by the manifest" in run("verify", sealed, code=6).stderr


def test_verify_with_a_source_of_another_format_says_so(sealed: Path) -> None:
    result = run("verify", sealed, "--source", NVFP4, code=6)
    assert "was made from another kind of checkpoint" in result.stderr


@pytest.mark.parametrize("kind", ["dangling", "fifo"])
def test_a_side_file_that_is_none_is_named(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "model"
    shutil.copytree(AWQ, source)
    (source / "tokenizer.json").unlink()
    if kind == "fifo":
        os.mkfifo(source / "tokenizer.json")
    else:
        (source / "tokenizer.json").symlink_to("gone")
    result = run(source, "--out", tmp_path / "out", code=3)
    assert "error: tokenizer.json: is no regular file, nor a link to one" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "value", "code"), [
    ("num_local_experts", 60_000, 3), ("num_local_experts", 1 << 40, 4), ("num_hidden_layers", 60_000, 3),
    ("num_hidden_layers", 1 << 40, 3), ("moe_intermediate_size", 0, 3), ("moe_intermediate_size", True, 3),
])  # fmt: skip
def test_numbers_out_of_range_end_at_once(tmp_path: Path, key: str, value: int, code: int) -> None:
    source = tmp_path / "model"
    shutil.copytree(AWQ, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, key: value}))
    result = run(source, "--out", tmp_path / "out", code=code)
    assert len(result.stderr.splitlines()) <= 13


def test_a_loop_of_symlinks_as_output_is_5(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    run(AWQ, "--out", tmp_path / "loop", code=5)
