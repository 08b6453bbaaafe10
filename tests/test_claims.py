"""Checkpoints whose small files claim what would take hours, fill a terminal, or take the place of something of ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from made import EXPERTS, SINGLE, awq, nvfp4, tensor
from sm70_convert.cli import main


def run(*args: object, code: int) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, (result.exit_code, result.output)
    return result


def errors(result: Result) -> list[str]:
    return [line.removeprefix("error: ") for line in result.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tensor_of_the_sentinels_name_is_refused(shards: int, tmp_path: Path) -> None:
    made = awq(shards=shards)
    name = "sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"
    made.add(name, tensor("BF16", (8,)))
    message = f"{name} ({next(iter(made.shards))}): has a name that prepared folders use for themselves"
    assert errors(run(made.write(tmp_path / "source"), "--out", tmp_path / "out", code=3)) == [message]
    assert not (tmp_path / "out").exists()


def test_more_experts_than_can_be_looked_for_are_refused_at_once(tmp_path: Path) -> None:
    made = awq(layers=8)
    made.config["num_experts"] = 65_536
    message = "config.json: has too many experts in all its layers: expected at most 500000, found 8 layers of 65536"
    assert errors(run("plan", made.write(tmp_path / "source"), code=4)) == [message]


def test_as_many_experts_as_can_be_looked_for_are_looked_for(tmp_path: Path) -> None:
    made = awq(layers=8)
    made.config["num_experts"] = 62_500
    assert "experts 4-62499 of 62500 have no tensors" in errors(run("plan", made.write(tmp_path / "source"), code=3))[0]


@pytest.mark.parametrize(("count", "code"), [(2_930, 0), (2_950, 4)])
def test_what_passes_through_fits_a_manifest_that_can_be_read_again(count: int, code: int, tmp_path: Path) -> None:
    made, out = awq(), tmp_path / "out"
    for number in range(count):
        made.add(f"{number:0>4000}", tensor("U8", (1,)))
    result = run(made.write(tmp_path / "source"), "--out", out, code=code)
    if code == 0:
        run("verify", out, "--source", tmp_path / "source", code=0)
        assert (out / "sm70/manifest.json").stat().st_size < 16_000_000
    else:
        message = "the 2954 tensors that would pass through are too many for a manifest"
        assert errors(result) == [
            f"{tmp_path}/source: {message}: expected at most 12000000 bytes of names and digests, found 12042337"
        ]
        assert not out.exists()


@pytest.mark.parametrize("depth", [64, 65, 1200])
def test_folders_nested_too_deep_are_refused(depth: int, tmp_path: Path) -> None:
    source, out = awq().write(tmp_path / "source"), tmp_path / "out"
    run(source, "--out", out, code=0)
    here = os.open(source, os.O_RDONLY)
    for _ in range(depth):  # the whole path may be longer than one call takes
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    result = run("plan", source, code=0 if depth == 64 else 3)
    told = f"{source}: cannot be read: more than 64 folders in one another"
    assert errors(result) == ([] if depth == 64 else [told])
    (source / "d").rename(out / "d")
    result = run("verify", out, code=0 if depth == 64 else 6)
    assert errors(result) == ([] if depth == 64 else [f"{out}: cannot be read: more than 64 folders in one another"])
    subprocess.run(["rm", "-rf", out], check=True)  # shutil.rmtree() recurses


def test_a_symlink_to_a_folder_is_left_out_and_told(tmp_path: Path) -> None:
    source, out = awq().write(tmp_path / "source"), tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/notes.txt").write_text("notes")
    (source / "assets").symlink_to("../elsewhere")
    run(source, "--out", out, code=0)
    assert not (out / "assets").exists()
    message = "symlinks to folders, which are not followed; left out"
    expected = {"message": message, "example": "assets", "count": 1, "layer": None}
    assert expected in json.loads((out / "sm70/manifest.json").read_text())["findings"]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("key", ["quant_algo", "quant_method"])
def test_a_value_of_megabytes_is_not_printed_whole(key: str, as_json: bool, tmp_path: Path) -> None:
    made = nvfp4()
    made.quantization[key] = "q" * 3_000_000
    result = run("plan", made.write(tmp_path / "source"), *(["--json"] if as_json else []), code=4)
    assert "q" * 1000 in result.output.lower()
    assert len(result.output) < 12_000


def test_a_name_of_4096_characters_is_printed_whole(tmp_path: Path) -> None:
    made = awq()
    name = f"{EXPERTS}.{'n' * (4096 - len(EXPERTS) - 1)}"
    made.add(name, tensor("I32", (8,)))
    (message,) = errors(run("plan", made.write(tmp_path / "source"), code=4))
    assert message == f"{name} ({SINGLE}): lies in the experts, but its name is not understood"
