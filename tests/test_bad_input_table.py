"""The table of odd and bad inputs, whole: each by item, with its exit code and message, or with what is found in it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bad_inputs import (
    BANK,
    FORMATS,
    NONFINITE,
    ROWS,
    SECOND,
    Edit,
    Row,
    assert_nothing_sealed,
    awq_product,
    contents,
    interrupted,
    lines,
    nothing,
    nvfp4_code,
    refused,
    run,
    seal,
    temporary_files,
)
from made import (
    EXPERTS,
    INDEX,
    LEFT_OUT,
    SINGLE,
    Made,
    Tensor,
    awq,
    edited,
    expert_tensors,
    f32,
    nvfp4,
    tensor,
    write_file,
)
from sm70_convert.cli import main

FAR_LARGER = "largest scale is over 64 times the median of its layer's experts"


# What is odd, but converted.
def finding(message: str, example: str, count: int = 1, layer: int | None = 0) -> dict[str, Any]:
    return {"message": message, "example": example, "count": count, "layer": layer}


def converted(name: str, make: Callable[[], Made], edit: Edit, *findings: dict[str, Any], **fields: Any) -> None:
    ROWS.append(Row(name, make, edit, 0, findings=findings, **fields))


def header_of_100_000(folder: Path) -> None:
    write_file(folder / SINGLE, awq().tensors, header_bytes=100_000)


def stale(folder: Path) -> None:
    """Other bytes under two names, in a shard that the index does not give them to."""
    second = awq(shards=2).shards[SECOND]
    extra = {
        f"{EXPERTS}.0.gate_proj.qweight": tensor("I32", (64, 8)),
        "model.embed_tokens.weight": tensor("BF16", (8, 64)),
    }
    write_file(folder / SECOND, {**second, **extra})


def unindexed(folder: Path) -> None:
    write_file(folder / "consolidated.safetensors", {"model.norm.weight": tensor("BF16", (64,))})


def empty_shard(made: Made) -> None:
    made.shards["model-00000-of-00002.safetensors"] = {}
    made.index = False


def other_globals(made: Made) -> None:
    made.change(f"{EXPERTS}.1.up_proj.weight_scale_2", data=f32(2e-3))
    made.change(f"{EXPERTS}.3.up_proj.weight_scale_2", data=f32(2e-3))


def globals_as_vectors(*experts: int) -> Edit:
    return lambda m: [
        m.change(name, shape=(1,))
        for name in m.tensors
        if name.endswith("_scale_2") and int(name.split(".")[5]) in experts
    ]


def zero_scales(part: str) -> Edit:
    return lambda m: m.change(f"{EXPERTS}.2.up_proj.{part}", data=b"\0")


def quantised_router(format_: str) -> Edit:
    def edit(made: Made) -> None:
        group_size = 32 if format_ == "awq" else None
        experts = expert_tensors("x.", 64, 4 * 8, group_size)
        made.drop("model.layers.0.mlp.gate.weight")
        for name, new in experts.items():
            if name.startswith("x.gate_proj."):
                made.add(f"model.layers.0.mlp.gate.{name.removeprefix('x.gate_proj.')}", new)

    return edit


for _name, _make, _edit, _part, _ in NONFINITE:
    _where = f"{EXPERTS}.2.{_part}"
    _sign = "some scales are negative" if _make is awq else "some block scales are negative"
    _found = [finding(FAR_LARGER, _where)] if "product" in _name else []
    _found += [finding("scales that are not finite in fp16 were kept", _where)]
    _found += [finding(_sign, _where)] if "negative" in _name else []
    converted(f"6-{_name}-allowed", _make, _edit, *_found, args=("--allow-nonfinite",))
converted("2-header-of-100000-bytes", awq, nothing, after=header_of_100_000, like=True)
converted("2-shard-without-tensors", partial(awq, shards=2), empty_shard, like=True)
converted("2-shard-without-tensors-beside-an-index", partial(awq, shards=2), nothing,
          finding("files that the index does not name; ignored", "empty.safetensors", layer=None),
          after=lambda folder: write_file(folder / "empty.safetensors", {}), like=True)  # fmt: skip
converted("3-stale-tensors", partial(awq, shards=2), nothing,
          finding("tensors in shards that the index does not give them to; ignored",
                  f"{EXPERTS}.0.gate_proj.qweight ({SECOND})", 2, None), after=stale, like=True)  # fmt: skip
converted("3-unindexed-file", partial(awq, shards=2), nothing,
          finding("files that the index does not name; ignored", "consolidated.safetensors", layer=None),
          after=unindexed, like=True)  # fmt: skip
converted("3-lone-index-beside-one-file", awq, lambda m: setattr(m, "index", True), like=True)
converted("5-gate-and-up-globals-differ", nvfp4, other_globals,
          finding("gate and up have different global scales", f"{EXPERTS}.1.gate_proj.weight_scale_2", 2))  # fmt: skip
converted("5-globals-of-one-element", nvfp4, globals_as_vectors(0, 1, 2, 3), like=True)
converted("5-globals-of-both-shapes", nvfp4, globals_as_vectors(0, 2), like=True)
converted("6-awq-largest-product", awq, awq_product(4364, 15),  # 65460, which fp16 can hold
          finding(FAR_LARGER, f"{EXPERTS}.2.up_proj.scales"))  # fmt: skip
converted("6-nvfp4-largest-product", nvfp4, nvfp4_code(0x7E, 146.2),
          finding(FAR_LARGER, f"{EXPERTS}.2.down_proj.weight_scale"))  # fmt: skip
converted("6-nvfp4-global-of-1e-40", nvfp4, nvfp4_code(0x38, 1e-40),
          finding("global scale is subnormal", f"{EXPERTS}.2.down_proj.weight_scale_2"))  # fmt: skip
converted("6-nvfp4-global-of-zero", nvfp4, nvfp4_code(0x38, 0.0),
          finding("global scale is zero", f"{EXPERTS}.2.down_proj.weight_scale_2"))  # fmt: skip
converted("6-nvfp4-all-block-scales-zero", nvfp4, zero_scales("weight_scale"),
          finding("all block scales are zero", f"{EXPERTS}.2.up_proj.weight_scale"))  # fmt: skip
converted("6-awq-all-scales-zero", awq, zero_scales("scales"),
          finding("all scales are zero", f"{EXPERTS}.2.up_proj.scales"))  # fmt: skip
converted("10-input-scale-absent-for-some", nvfp4,
          lambda m: m.drop(f"{EXPERTS}.1.up_proj.input_scale", f"{EXPERTS}.3.gate_proj.input_scale"), like=True)  # fmt: skip
for _format, _make in FORMATS.items():
    converted(f"10-{_format}-router-with-quantised-weights", _make, quantised_router(_format), like=True)


# 9. The output folder; its checkpoint is right.
def full(_source: Path, _out: Path, patch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "pwrite", no_room)


def not_writable(_source: Path, _out: Path, patch: pytest.MonkeyPatch) -> None:
    access = os.access  # a superuser may write anywhere, so the question is answered for it
    patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))


def not_empty(_source: Path, out: Path, _patch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    (out / "notes.txt").write_bytes(b"mine")


def of_another_plan(source: Path, out: Path, patch: pytest.MonkeyPatch) -> None:
    interrupted(source, out, patch)


def of_another_version(source: Path, out: Path, patch: pytest.MonkeyPatch) -> None:
    journal = interrupted(source, out, patch)
    with edited(journal) as head:
        head["plan"]["format_version"] = 2
    journal.write_bytes(journal.read_bytes() + b"\n")


for _name, _error, _fields in (
    ("in-the-source", "{out}: output and checkpoint overlap", {"out": "source/out"}),
    ("full-disk", "sm70/journal.jsonl: cannot be written: No space left on device", {"before": full}),
    ("not-writable", "{parent}: is not writable", {"before": not_writable}),
    ("not-empty", "{out}: is not empty, and holds no manifest or journal of this tool", {"before": not_empty}),
    ("another-plan", "sm70/journal.jsonl: belongs to another plan: hash differs: expected blake3, found sha256",
     {"before": of_another_plan, "args": ("--hash", "sha256")}),
    ("another-version", "sm70/journal.jsonl: belongs to another plan: format_version differs: expected 2, found 1",
     {"before": of_another_version}),
):  # fmt: skip
    refused(f"9-{_name}", awq, nothing, 5, _error, **_fields)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_bad_input_gets_what_the_table_says(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = row.write(tmp_path / "source"), tmp_path / row.out
    row.before(source, out, monkeypatch)
    before = contents(tmp_path)
    if row.code:
        assert_refused(row, source, out)
        assert_nothing_sealed(out)
        written = contents(tmp_path).keys() - before.keys()
        assert {path: data for path, data in contents(tmp_path).items() if path not in written} == before
        if row.planned:
            assert written == set()
        else:
            assert f"out/{BANK}" not in written
    else:
        assert_converted(row, source, out, tmp_path)


def test_every_item_of_the_table_is_there() -> None:
    """Ten items; each has what is refused, or what is converted, or both, as the table says."""
    items = {item: sorted({row.code for row in ROWS if row.item == item}) for item in range(1, 11)}
    assert items == {
        1: [4], 2: [0, 3], 3: [0, 3], 4: [3, 4], 5: [0, 4], 6: [0, 3], 7: [3, 4], 8: [3, 4], 9: [5], 10: [0],
    }  # fmt: skip
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(len(row.errors) > 0 for row in ROWS if row.code)


def test_the_rows_that_the_documentation_names_exist() -> None:
    patterns = re.findall(r"`([0-9]+-[^`\s]*)`", (Path(__file__).parent.parent / "docs/reliability.md").read_text())
    assert len(patterns) > 20
    assert [p for p in patterns if not any(fnmatchcase(row.name, p) for row in ROWS)] == []


def assert_refused(row: Row, source: Path, out: Path) -> None:
    places = {"{source}": str(source), "{out}": str(out), "{parent}": str(out.parent)}
    result = run(source, out, *row.args)
    errors = list(row.errors)
    for name, place in places.items():
        errors = [error.replace(name, place) for error in errors]
    assert lines(result) == [f"error: {error}" for error in errors]
    assert result.exit_code == row.code
    assert result.stdout == ""
    hints = lines(result, "next: ")
    assert hints == [f"next: {row.hint}"] if row.hint else hints

    as_json = json.loads(run(source, out, *row.args, "--json").stdout)["error"]
    assert as_json["exit_code"] == row.code
    assert as_json["total"] == len(row.errors)
    assert all("tensor" in problem or "file" in problem for problem in as_json["problems"])


def assert_converted(row: Row, source: Path, out: Path, tmp_path: Path) -> None:
    document = seal(source, out, *row.args)
    assert document["status"] == "sealed"
    made, findings = row.make(), list(row.findings)
    row.edit(made)
    if unneeded := sorted(n for n in made.tensors if n.startswith(EXPERTS) and n.endswith(".input_scale")):
        findings.append(finding(LEFT_OUT, unneeded[0], len(unneeded)))
    assert document["findings"] == findings
    manifest = json.loads((out / "sm70" / "manifest.json").read_bytes())
    assert manifest["findings"] == findings
    assert temporary_files(out) == []
    if row.like:
        seal(row.make().write(tmp_path / "clean"), tmp_path / "like")
        assert (out / BANK).read_bytes() == (tmp_path / "like" / BANK).read_bytes()
    assert passed_through(out) == {n: t for n, t in made.tensors.items() if not n.startswith(f"{EXPERTS}.")}
    result = CliRunner().invoke(main, ["verify", str(out), "--source", str(source)])
    assert result.exit_code == 0, result.stderr


def passed_through(out: Path) -> dict[str, Tensor]:
    """What the output's index lists besides the sentinel, read by a few lines of our own."""
    weight_map = json.loads((out / INDEX).read_bytes())["weight_map"]
    found = {}
    for file in set(weight_map.values()):
        data = (out / file).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert weight_map[name] == file
                begin, end = (start + offset for offset in entry["data_offsets"])
                found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[begin:end])
    assert found.keys() == weight_map.keys()
    del found["sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"]
    return found
