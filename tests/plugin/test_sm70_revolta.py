"""The plugin on ReVolta 0.1.4's own Python, and on a 1Cat-vLLM tree: its conversion against the replay, and every mismatch."""

from __future__ import annotations

from typing import Any

import pytest
from revolta_env import onecat_tree, revolta_tree, run_contract

SENTINEL = "sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"
BANK = "sm70/tp2/rank1/layer-00001.safetensors"
# Items of one layer that are compared at least: parameters, buffers and attributes.
REPLAYS = {
    "replay-awq-half2-on": 90,
    "replay-awq-half2-off": 88,
    "replay-awq-compact-on": 90,
    "replay-awq-compact-off": 88,
    "replay-awq-int4zero-on": 90,
    "replay-awq-int4zero-off": 88,
    "replay-nvfp4-fp16-on": 73,
    "replay-nvfp4-fp16-off": 65,
    "replay-nvfp4-raw-on": 73,
    "replay-nvfp4-raw-off": 69,
}
ASKS, ORDER = (
    "the runtime asks for another layout than the folder has",
    "another order of gate and up in w13 than the folder has",
)
COMPACT, INT4_ZERO = "VLLM_SM70_AWQ_MOE_COMPACT_METADATA", "VLLM_SM70_AWQ_MOE_INT4_ZERO"
BATCHED = "VLLM_SM70_AWQ_MOE_BATCHED_GEMM"
RAW = "VLLM_SM70_NVFP4_QWEN38_MOE_RAW_SCALE"
# What is said, and the next step.
STOPS = {
    "stop-interleaved": (
        f"{ORDER}: expected interleaved, found not interleaved",
        f"set {BATCHED}=1 if this runtime can use that for this shape, or convert again with --interleave off",
    ),
    "stop-not-interleaved": (
        f"{ORDER}: expected not interleaved, found interleaved",
        f"set {BATCHED}=0 if this runtime can use that for this shape, or convert again with --interleave on",
    ),
    "stop-half2-for-compact": (f"{ASKS}: expected awq-half2, found awq-compact", f"set {COMPACT}=0 if"),
    "stop-half2-for-int4zero": (f"{ASKS}: expected awq-half2, found awq-int4zero", f"set {COMPACT}=0 {INT4_ZERO}=0 if"),
    "stop-compact-for-half2": (
        f"{ASKS}: expected awq-compact, found awq-half2",
        f"set {COMPACT}=1 if this runtime can use awq-compact for this shape, or convert again with --layout awq-half2",
    ),
    "stop-int4zero-for-compact": (f"{ASKS}: expected awq-int4zero, found awq-compact", f"set {INT4_ZERO}=1 if"),
    "stop-nvfp4-interleaved": (
        f"{ORDER}: expected interleaved, found not interleaved",
        "set VLLM_SM70_NVFP4_QWEN38_MOE_FUSED_SWIGLU_PREFILL=1 if",
    ),
    "stop-fp16-for-raw": (f"{ASKS}: expected nvfp4-fp16, found nvfp4-raw", f"set {RAW}=0 if"),
    "stop-raw-for-fp16": (f"{ASKS}: expected nvfp4-raw, found nvfp4-fp16", f"set {RAW}=1 if"),
    "stop-tp": (
        "has no banks for TP size 4: expected TP size 2, found 4",
        "start with --tensor-parallel-size 2, or add banks",
    ),
    "stop-ep": ("layer 0: expert parallelism is not supported", "start without --enable-expert-parallel"),
    "stop-shape": ("expected (4, 128, 64), found (4, 256, 64)", "config.json is not that of the checkpoint"),
    "stop-experts": ("expected (4, 128, 64), found (8, 128, 64)", "config.json is not that of the checkpoint"),
    "stop-not-filled": ("layer 0: bank was not filled", "start with --load-format sm70_prepared"),
    "load-missing-layer": ("the model has no routed experts in layers 1, which have banks", "please report it"),
    "load-skinny": (
        "experts to a method that takes no banks: expected an SM70 method for nvfp4-fp16, found Skinny",
        """turn the skinny kernel off: --kernel-config '{"sm70_skinny_moe": false}'""",
    ),
    "load-plain-strict": ("is not a prepared folder", "make one with: sm70-convert"),
    "load-elsewhere": ("is no folder on this machine", "fetch it first (hf download"),
    "load-other-loader": (
        "is a prepared folder, and this load format fills no banks",
        "start with --load-format sm70_prepared",
    ),
}
BROKEN = {
    "load-truncated": f"{BANK} layer 1 rank 1: bank is truncated: expected ",
    "load-missing": f"{BANK} layer 1 rank 1: bank is missing: No such file or directory\nnext: copy it again",
    "load-altered": f"w2_tm_weight ({BANK}) rank 1: has other bytes than the manifest says: expected ",
    "load-unsealed": "sm70/manifest.json: is missing\nnext: not a sealed folder",
}
LOADS = ("load-sm70_prepared", "load-auto", "load-safetensors", "load-nvfp4")
OTHERS = ("load-stage", "load-drafter", "load-plain", "load-plain-verify", "without-bank")
ONECAT = ("replay-awq-half2-on", "replay-awq-half2-off", "stop-interleaved", "load-auto", "load-plain", "without-bank")


@pytest.fixture(scope="module")
def revolta(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of all cases on ReVolta, run once."""
    cases = (*REPLAYS, *STOPS, *BROKEN, *LOADS, *OTHERS)
    return run_contract(revolta_tree(), tmp_path_factory.mktemp("revolta"), *cases)


@pytest.fixture(scope="module")
def onecat(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of what 1Cat-vLLM has."""
    return run_contract(onecat_tree(), tmp_path_factory.mktemp("onecat"), *ONECAT)


def outcome(report: dict[str, Any], case: str) -> dict[str, Any]:
    result: dict[str, Any] = report[case]
    assert "traceback" not in result, result.get("traceback")
    return result


@pytest.mark.parametrize("case", REPLAYS)
def test_replay_builds_the_layer_that_conversion_builds(revolta: dict[str, Any], case: str) -> None:
    result = outcome(revolta, case)
    assert result["compared"] >= REPLAYS[case] >= 50
    assert result["prepared_for_real"] == 0


@pytest.mark.parametrize("case", STOPS)
def test_mismatch_stops_with_what_to_do(revolta: dict[str, Any], case: str) -> None:
    message, step = STOPS[case]
    lines = outcome(revolta, case)["lines"]
    assert len(lines) == 2
    assert message in lines[0]
    assert lines[1].startswith("next: ")
    assert step in lines[1]


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder_stops_before_it_is_served(revolta: dict[str, Any], case: str) -> None:
    result = outcome(revolta, case)
    assert result["error"] == "IntegrityError"
    assert BROKEN[case] in result["text"]


@pytest.mark.parametrize("case", LOADS)
def test_real_loader_fills_banks_and_streams_the_index_without_the_sentinel(revolta: dict[str, Any], case: str) -> None:
    result = outcome(revolta, case)
    assert result["is_default_loader"]
    assert result["prepared_for_real"] == 0
    assert sorted(result["banks"]) == ["w13_tm_scales", "w13_tm_weight", "w2_tm_scales", "w2_tm_weight"]
    assert SENTINEL in result["index"]
    assert len(result["seen"]) == 21
    assert sorted([*result["seen"], SENTINEL]) == result["index"]


def test_pipeline_stage_loads_its_own_layers(revolta: dict[str, Any]) -> None:
    result = outcome(revolta, "load-stage")
    assert len(result["banks"]) == 4
    assert result["prepared_for_real"] == 0


def test_drafter_of_the_same_folder_keeps_its_own_experts(revolta: dict[str, Any]) -> None:
    assert outcome(revolta, "load-drafter")["prepared_for_real"] == 2 * 4
    assert outcome(revolta, "without-bank") == {"layers": 2}


def test_other_checkpoints_load_as_ever(revolta: dict[str, Any]) -> None:
    result = outcome(revolta, "load-plain")
    assert result["prepared_for_real"] == 2 * 2 * 4
    assert len(result["seen"]) == 21 + 2 * 4 * 9
    lines = outcome(revolta, "load-plain-verify")["lines"]
    assert len(lines) == 2
    assert "verify is for prepared folders, and this is none" in lines[0]
    assert lines[1] == "next: leave verify out"


def test_onecat_builds_the_same_layer(onecat: dict[str, Any]) -> None:
    for case in ("replay-awq-half2-on", "replay-awq-half2-off"):
        result = outcome(onecat, case)
        assert result["compared"] >= 75
        assert result["prepared_for_real"] == 0
    assert ORDER in outcome(onecat, "stop-interleaved")["lines"][0]
    assert len(outcome(onecat, "load-auto")["seen"]) == 21
    assert outcome(onecat, "load-plain")["prepared_for_real"] == 2 * 2 * 4
