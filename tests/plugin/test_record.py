"""`sm70_record` over ReVolta's own Python: its loader, its cut and its conversion make the banks that the converter made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from revolta_env import onecat_tree, revolta_tree, run_contract

DIGESTS = 2 * 2 * 4  # layers, ranks, tensors
SMALL_CASES = tuple(
    f"record-{name}"
    for name in (
        "awq-half2-on",
        "awq-half2-off",
        "awq-compact-on",
        "awq-compact-off",
        "awq-int4zero-on",
        "awq-int4zero-off",
        "nvfp4-fp16-off",
    )
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_contract(revolta_tree(), tmp_path_factory.mktemp("record"), script="record_contract.py")


def case(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = report[name]
    assert "traceback" not in found, found["traceback"]
    return found


@pytest.mark.parametrize("name", SMALL_CASES)
def test_the_runtime_prepares_what_the_converter_made(report: dict[str, Any], name: str) -> None:
    found = case(report, name)
    assert found["files"] == ["rank0-of-2.json", "rank1-of-2.json"]
    assert (found["exit_code"], found["problems"], found["against"]) == (0, [], DIGESTS)
    # The settings that were in force, of those that have to do with the layout.
    prefix = "VLLM_SM70_AWQ" if "awq" in name else "VLLM_SM70_NVFP4"
    assert found["flags"] == {k: v for k, v in found["settings"].items() if k.startswith(prefix)}
    assert len(found["flags"]) >= 1


@pytest.mark.parametrize(("layout", "tensors"), [("nvfp4-fp16", 4), ("nvfp4-raw", 6)])
def test_the_layouts_of_one_shape_alone(report: dict[str, Any], layout: str, tensors: int) -> None:
    found = case(report, f"full-{layout}-on")
    assert (found["rank"], found["tp_size"], found["layout"], found["interleave"]) == (1, 4, layout, True)
    assert (found["equal"], len(found["tensors"])) == (tensors, tensors)


def test_each_pipeline_stage_records_its_own_layers(report: dict[str, Any]) -> None:
    found = case(report, "stages")
    assert found["files"] == [f"rank{r}-of-2-stage{s}.json" for r in range(2) for s in range(2)]
    assert (found["exit_code"], found["against"]) == (0, DIGESTS)


def test_sha256(report: dict[str, Any]) -> None:
    found = case(report, "sha256")
    assert (found["same"]["exit_code"], found["same"]["against"]) == (0, DIGESTS)
    assert found["other"]["exit_code"] == 6
    assert [p["message"] for p in found["other"]["problems"]] == [
        "has digests of another algorithm than this folder"
    ] * 2


@pytest.mark.parametrize(("name", "tensor"), [("flipped-qweight", "w2_tm_weight"), ("flipped-scale", "w13_tm_scales")])
def test_one_flipped_bit_of_a_source_is_found_and_named(report: dict[str, Any], name: str, tensor: str) -> None:
    found = case(report, name)
    assert found["exit_code"] == 6
    assert [(p["tensor"], p["layer"], p["rank"]) for p in found["problems"]] == [(tensor, 1, 1)]
    assert "rank1-of-2.json says" in found["problems"][0]["message"]


def test_one_flipped_bit_of_a_bank_is_found(report: dict[str, Any]) -> None:
    found = case(report, "flipped-bank")
    assert found["exit_code"] == 6
    assert [(p["tensor"], p["message"]) for p in found["problems"]] == [
        ("w2_tm_weight", "has other bytes than the manifest says")
    ]


def test_a_drafter_writes_nothing(report: dict[str, Any]) -> None:
    assert case(report, "drafter") == {"files": []}


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "stop-prepared",
            "UsageError",
            ["this folder is prepared already", "give the checkpoint that it was made from"],
        ),
        ("stop-experts", "UnsupportedError", ["experts are spread over the ranks", "without --enable-expert-parallel"]),
        (
            "stop-no-folder",
            "UsageError",
            ["sm70_record needs a folder to write to", """'{"record_hashes": "FOLDER"}'"""],
        ),
        (
            "stop-hash",
            "UsageError",
            ["record_hash: expected one of blake3, sha256, found 'md5'", "leave record_hash out"],
        ),
        ("stop-no-banks", "UnsupportedError", ["this runtime prepared no SM70 banks", '{"sm70_skinny_moe": false}']),
        (
            "stop-unknown",
            "UnsupportedError",
            ["layer 0: the runtime prepared a layout that this tool does not know", "this runtime's version"],
        ),
    ],
)
def test_what_cannot_be_recorded_stops(report: dict[str, Any], name: str, error: str, said: list[str]) -> None:
    found = case(report, name)
    assert found["error"] == error
    assert not found.get("written", False)
    assert len(found["lines"]) == len(said)
    for line, part in zip(found["lines"], said, strict=True):
        assert part in line


def test_onecat_prepares_the_same(tmp_path: Path) -> None:
    names = ("record-awq-half2-on", "record-awq-half2-off", "flipped-qweight")
    report = run_contract(onecat_tree(), tmp_path, *names, script="record_contract.py")
    assert [case(report, name)["against"] for name in names] == [DIGESTS, DIGESTS, None]
    assert [p["tensor"] for p in report["flipped-qweight"]["problems"]] == ["w2_tm_weight"]


def test_no_case_is_left_out(report: dict[str, Any]) -> None:
    assert len(report) == len(SMALL_CASES) + 2 + 12


def test_the_tree_is_revoltas() -> None:
    assert (Path(revolta_tree()) / "vllm" / "revolta_profile.py").is_file()
