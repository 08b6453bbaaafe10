"""`verify --against`: a prepared folder held against what a runtime recorded, tensor by tensor, and against another folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sm70_convert.cli import main
from sm70_convert.errors import IntegrityError
from sm70_convert.manifest import read_manifest
from sm70_convert.recorded import Record, RecordedLayer, read_record, record_name, records_of, write_record

CHECKPOINT = Path(__file__).parent / "data" / "modelopt-nvfp4-qwen3moe-sharded"
TENSORS = 4  # of one bank
OTHER = "0" * 64


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def convert(out: Path, *options: object) -> Path:
    result = run(CHECKPOINT, "--out", out, *options)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("sealed") / "out", "--tp-size", 1, "--tp-size", 2)


@pytest.fixture
def recorded(sealed: Path, tmp_path: Path) -> Path:
    """What a runtime that prepares the same banks would record at TP 2."""
    folder = tmp_path / "recorded"
    for record in records_of(read_manifest(sealed), "-"):
        if record.tp_size == 2:
            write_record(folder, record)
    return folder


def edit(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def layers_of(folder: Path) -> list[int]:
    return list(read_manifest(folder).layers)


def problems(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["error"]["problems"]
    return found


def test_equal_digests_are_counted(sealed: Path, recorded: Path) -> None:
    result = run("verify", sealed, "--against", recorded, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["against"] == len(layers_of(sealed)) * 2 * TENSORS > 0
    assert document["checked"] == "digests"
    assert "recorded digests, all equal" in run("verify", sealed, "--against", recorded).stdout


def test_without_against_nothing_is_said_of_it(sealed: Path) -> None:
    assert "against" not in json.loads(run("verify", sealed, "--json").stdout)


def test_quick_and_one_file_a_time_and_one_rank(sealed: Path, recorded: Path) -> None:
    files = [recorded / record_name(r, 2) for r in range(2)]
    both = run("verify", sealed, "--quick", "--against", files[0], "--against", files[1], "--json")
    assert json.loads(both.stdout)["against"] == len(layers_of(sealed)) * 2 * TENSORS
    one = run("verify", sealed, "--rank", 1, "--against", recorded, "--json")
    assert json.loads(one.stdout)["against"] == len(layers_of(sealed)) * TENSORS
    alone = run("verify", sealed, "--against", files[0])
    assert alone.exit_code == 6
    assert "rank 1: has no record at all of TP size 2" in alone.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tensor", ["w13_tm_weight", "w13_tm_scales", "w2_tm_weight", "w2_tm_scales"])
def test_each_changed_digest_is_one_problem(sealed: Path, recorded: Path, rank: int, tensor: str) -> None:
    layer = layers_of(sealed)[-1]
    file = recorded / record_name(rank, 2)
    edit(file, lambda d: d["layers"][str(layer)]["tensors"].update({tensor: OTHER}))
    found = problems(run("verify", sealed, "--against", recorded, "--json"))
    assert len(found) == 1
    bank = f"sm70/tp2/rank{rank}/layer-{layer:05d}.safetensors"
    assert {k: found[0][k] for k in ("tensor", "file", "layer", "rank", "message", "expected")} == {
        "tensor": tensor,
        "file": bank,
        "layer": layer,
        "rank": rank,
        "message": f"is not what {file} says",
        "expected": OTHER,
    }
    shown = run("verify", sealed, "--against", recorded)
    assert shown.exit_code == 6
    assert f"error: {tensor} ({bank}) rank {rank}: is not what {file} says: expected {OTHER}, found " in shown.stderr


def test_every_mismatch_is_reported(sealed: Path, recorded: Path) -> None:
    def all_of_them(document: dict[str, Any]) -> None:
        for entry in document["layers"].values():
            entry["tensors"] = dict.fromkeys(entry["tensors"], OTHER)

    for rank in range(2):
        edit(recorded / record_name(rank, 2), all_of_them)
    error = json.loads(run("verify", sealed, "--against", recorded, "--json").stdout)["error"]
    assert error["total"] == len(layers_of(sealed)) * 2 * TENSORS


def test_a_tensor_on_one_side_alone(sealed: Path, recorded: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        tensors = next(iter(document["layers"].values()))["tensors"]
        tensors["w13_raw_scale_codes"] = tensors.pop("w13_tm_scales")

    edit(recorded / record_name(0, 2), rename)
    found = problems(run("verify", sealed, "--against", recorded, "--json"))
    assert [(p["tensor"], p["expected"] == "no such tensor", p["actual"] == "no such tensor") for p in found] == [
        ("w13_raw_scale_codes", False, True),
        ("w13_tm_scales", True, False),
    ]


def test_a_flipped_byte_of_a_bank(sealed: Path, recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy)
    bank = next((copy / "sm70" / "tp2" / "rank1").iterdir())
    data = bytearray(bank.read_bytes())
    data[-1] ^= 1
    bank.write_bytes(data)
    result = run("verify", copy, "--against", recorded)
    assert result.exit_code == 6
    assert "has other bytes than the manifest says" in result.stderr


def test_layers_missing_on_either_side(sealed: Path, recorded: Path) -> None:
    layers = layers_of(sealed)
    file = recorded / record_name(0, 2)
    edit(file, lambda d: d["layers"].update({"77": d["layers"].pop(str(layers[0]))}))
    result = run("verify", sealed, "--against", recorded)
    assert result.exit_code == 6
    assert f"{file} layer 77 rank 0: has a layer that this folder has no banks of" in result.stderr
    assert f"{file} rank 0: lacks layers {layers[0]}, which this folder has" in result.stderr


def test_pipeline_stages_make_one_rank(sealed: Path, tmp_path: Path) -> None:
    layers = layers_of(sealed)
    assert len(layers) > 1
    for record in records_of(read_manifest(sealed), "-"):
        if record.tp_size == 1:
            for stage, some in enumerate((layers[:1], layers[1:])):
                write_record(tmp_path, Record(0, 1, record.hash, {i: record.layers[i] for i in some}), stage)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0-of-1-stage0.json", "rank0-of-1-stage1.json"]
    document = json.loads(run("verify", sealed, "--against", tmp_path, "--json").stdout)
    assert document["against"] == len(layers) * TENSORS


def test_another_layout(sealed: Path, recorded: Path) -> None:
    first = str(layers_of(sealed)[0])
    edit(recorded / record_name(1, 2), lambda d: d["layers"][first].update(layout="nvfp4-raw"))
    found = problems(run("verify", sealed, "--against", recorded, "--json"))
    assert len(found) == 1
    assert (found[0]["layer"], found[0]["rank"]) == (int(first), 1)
    assert (found[0]["expected"], found[0]["actual"]) == ("nvfp4-fp16, interleave off", "nvfp4-raw, interleave off")
    assert "--layout nvfp4-raw --interleave off" in found[0]["hint"]
    assert "VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE=0" in found[0]["hint"]


def test_a_tp_size_that_the_folder_lacks(sealed: Path, tmp_path: Path) -> None:
    write_record(tmp_path, Record(3, 4, "blake3", {0: RecordedLayer("awq-half2", True, {"w2_tm_weight": OTHER})}))
    result = run("verify", sealed, "--against", tmp_path)
    assert result.exit_code == 6
    file = tmp_path / "rank3-of-4.json"
    assert (
        f"error: {file} rank 3: is of a TP size that this folder has no banks for: expected TP size 1 or 2, found 4"
        in result.stderr
    )
    assert "--tp-size 4" in result.stderr


def test_another_hash_algorithm(sealed: Path, recorded: Path) -> None:
    for rank in range(2):
        edit(recorded / record_name(rank, 2), lambda d: d.update(hash="sha256"))
    result = run("verify", sealed, "--against", recorded)
    assert result.exit_code == 6
    assert "has digests of another algorithm than this folder: expected blake3, found sha256" in result.stderr
    assert '"record_hash": "blake3"' in result.stderr


def test_nothing_there(sealed: Path, tmp_path: Path) -> None:
    missing = run("verify", sealed, "--against", tmp_path / "no")
    assert missing.exit_code == 2
    assert "no such file or folder" in missing.stderr
    (tmp_path / "other.json").write_text("{}")
    empty = run("verify", sealed, "--against", tmp_path)
    assert empty.exit_code == 6
    assert "holds neither records of hashes" in empty.stderr


def test_another_prepared_folder(sealed: Path, tmp_path: Path) -> None:
    same = convert(tmp_path / "same", "--tp-size", 2)
    result = run("verify", sealed, "--against", same, "--json")
    assert json.loads(result.stdout)["against"] == len(layers_of(sealed)) * 2 * TENSORS
    other = convert(tmp_path / "other", "--tp-size", 2, "--interleave", "on")
    differs = run("verify", sealed, "--against", other)
    assert differs.exit_code == 6
    assert (
        "has another layout than this folder: expected nvfp4-fp16, interleave off, found nvfp4-fp16, interleave on"
        in (differs.stderr)
    )
    back = run("verify", same, "--against", sealed)
    assert back.exit_code == 6
    assert "expected TP size 2, found 1" in back.stderr


RECORD = Record(1, 2, "blake3", {3: RecordedLayer("awq-half2", True, {"a": OTHER}, {"FLAG": "1"})})


def test_a_record_reads_back_and_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    path = write_record(tmp_path, RECORD)
    first = path.read_bytes()
    read = read_record(path)
    assert (read.rank, read.tp_size, read.hash, read.layers) == (1, 2, "blake3", RECORD.layers)
    assert write_record(tmp_path, read).read_bytes() == first
    assert json.loads(first) == {
        "format_version": 1,
        "rank": 1,
        "tp_size": 2,
        "hash": "blake3",
        "layers": {
            "3": {
                "layout": "awq-half2",
                "interleave_gate_up": True,
                "flags": {"FLAG": "1"},
                "tensors": {"a": OTHER},
            }
        },
    }


WRONG = {
    "rank": 2,
    "tp_size": True,
    "hash": 1,
    "layers": {},
    "extra": 1,
    "format_version": 2,
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_record_is_refused(tmp_path: Path, key: str) -> None:
    path = write_record(tmp_path, RECORD)
    edit(path, lambda d: d.update({key: WRONG[key]}))
    message = "format version" if key == "format_version" else "is no record of hashes, or was altered"
    with pytest.raises(IntegrityError, match=message):
        read_record(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", "awq-half3"),
        ("interleave_gate_up", 1),
        ("tensors", {}),
        ("tensors", {"a": "00"}),
        ("flags", {"a": 1}),
    ],
)
def test_a_wrong_layer_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = write_record(tmp_path, RECORD)
    edit(path, lambda d: d["layers"]["3"].update({field: value}))
    with pytest.raises(IntegrityError, match="is no record of hashes, or was altered"):
        read_record(path)
