"""Stock vLLM on prepared folders: against the same banks made at load, and against an independent model in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stock_run import DATA, Case, convert, options, require_stock_vllm, start
from tiny_qwen3_moe import TinyQwen3Moe

STEPS = 32
AWQ_G64 = Case(
    "autoawq-gemm-g64-qwen3moe",
    (
        (287, 50, 19, 249, 112, 275),
        (76, 232, 281, 185, 111, 196),
        (21, 241, 300, 303, 268, 213),
        (123, 258, 268, 69, 223, 309),
    ),
)
AWQ_G32 = Case(
    "gptqmodel-awq-gemm-g32-qwen3moe",
    (
        (127, 266, 152, 186, 311, 123),
        (39, 54, 213, 20, 38, 287),
        (21, 241, 300, 303, 268, 213),
        (240, 4, 28, 92, 125, 227),
    ),
)
NVFP4 = Case(
    "modelopt-nvfp4-qwen3moe-sharded",
    (
        (210, 140, 74, 167, 305, 158),
        (104, 110, 290, 93, 304, 315),
        (127, 266, 152, 186, 311, 123),
        (77, 60, 13, 91, 159, 33),
    ),
)
CASES = [AWQ_G64, AWQ_G32, NVFP4]
ARMS = {"prepared": {"load_format": "sm70_prepared"}, "load-time": {"quantization": "sm70_load_time"}}


@pytest.fixture(scope="module", autouse=True)
def _stock() -> None:
    require_stock_vllm()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prepared folders of all cases, with banks for TP 1 and 2."""
    root = tmp_path_factory.mktemp("prepared")
    return {c.checkpoint: convert(DATA / c.checkpoint, root / c.checkpoint, 1, 2) for c in CASES}


def run(case: Case, folders: dict[str, Path], tmp_path: Path, arm: str, dtype: str, tp_size: int) -> dict[str, Any]:
    model = folders[case.checkpoint] if arm == "prepared" else DATA / case.checkpoint
    engine = options(dtype=dtype, tp_size=tp_size, **ARMS[arm])
    result, log = start(tmp_path, model, engine, prompts=case.prompts, max_tokens=STEPS, repeats=2)
    assert result is not None, log[-4000:]
    if arm == "prepared":
        assert log.count("exact and very slow") == 1
        assert log.count("sm70-convert: TP rank") == tp_size
    return result


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.checkpoint)
def test_acceptance(case: Case, tp_size: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """In fp32 both arms give the same tokens, ends, log-probabilities, banks and memory, twice: the independent model's."""
    prepared, converted = (run(case, folders, tmp_path, arm, "float32", tp_size) for arm in ARMS)

    runs = [*prepared["repeats"], *converted["repeats"]]
    assert len(runs) == 4
    assert all(r == runs[0] for r in runs)
    assert len(runs[0]) == 4
    assert [a["finish_reason"] for a in runs[0]] == ["stop", "stop", "length", "length"]
    assert all(a["tokens"][-1] == 0 and a["stop_reason"] is None for a in runs[0][:2])

    workers = [(w["rank"], w["banks"], w["bytes"]) for w in prepared["workers"]]
    assert workers == [(w["rank"], w["banks"], w["bytes"]) for w in converted["workers"]]
    layers = 2 if case is NVFP4 else 1
    assert [rank for rank, _, _ in workers] == list(range(tp_size))
    assert all(len(banks) == 4 * layers for _, banks, _ in workers)

    model = TinyQwen3Moe(folders[case.checkpoint], tp_size)
    compared = 0
    for prompt, answer in zip(case.prompts, runs[0], strict=True):
        ids = [*prompt, *answer["tokens"]]
        expected = model.logits(torch.tensor([ids[:-1]]))[0, len(prompt) - 1 :].log_softmax(-1)
        assert expected.argmax(-1).tolist() == answer["tokens"]
        own = expected[torch.arange(len(expected)), answer["tokens"]]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), own, rtol=0, atol=1e-4)
        compared += len(own)
    assert compared >= 2 * STEPS + 8


@pytest.mark.parametrize(("case", "dtype"), [(AWQ_G64, "float16"), (NVFP4, "bfloat16")], ids=["awq", "nvfp4"])
def test_half_precision(case: Case, dtype: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """With vLLM's own kernel for dense AWQ layers, and in the dtype that a plain start takes, both arms are the same too."""
    prepared, converted = (run(case, folders, tmp_path, arm, dtype, 1) for arm in ARMS)
    assert prepared["repeats"] == converted["repeats"]
    assert prepared["workers"][0]["banks"] == converted["workers"][0]["banks"]
    assert len(prepared["repeats"][0]) == 4


def test_pipeline_stages_load_their_own_layers(folders: dict[str, Path], tmp_path: Path) -> None:
    """TP 2 x PP 2: each rank of a stage holds the bank of the stage's one prepared layer and no other.

    Loading only: vLLM 0.32's CPU runner fails on the first step of any model under pipeline parallelism.
    """
    engine = options(dtype="float32", tp_size=2, pp_size=2, **ARMS["prepared"])
    environ = {"VLLM_PP_LAYER_PARTITION": "2,1"}
    result, log = start(tmp_path, folders[NVFP4.checkpoint], engine, repeats=0, environ=environ)
    assert result is not None, log[-4000:]
    held = {w["rank"]: w["banks"] for w in result["workers"]}
    assert {rank: {name.split(".")[2] for name in banks} for rank, banks in held.items()} == {
        0: {"1"}, 1: {"1"}, 2: {"2"}, 3: {"2"},
    }  # fmt: skip
    assert all(len(banks) == 4 for banks in held.values())
    assert log.count(" 1 layers, in ") == 4
    assert set(held[0].values()).isdisjoint(held[1].values())


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(("case", "tolerance"), [(AWQ_G64, 1e-4), (AWQ_G32, 1e-4)], ids=["g64", "g32"])
def test_the_independent_model_is_the_exporters(
    case: Case, tolerance: float, tp_size: int, folders: dict[str, Path]
) -> None:
    check_against_exporter(folders[case.checkpoint], case.checkpoint, tp_size, tolerance)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_independent_nvfp4_model_is_the_exporters(tp_size: int, tmp_path: Path) -> None:
    """On the checkpoint without a near-tie of the router, which the fp16 rounding of scales would turn."""
    checkpoint = "modelopt-w4a16nvfp4-qwen3moe"
    check_against_exporter(convert(DATA / checkpoint, tmp_path / "out", tp_size), checkpoint, tp_size, 1e-3)


def check_against_exporter(folder: Path, checkpoint: str, tp_size: int, tolerance: float) -> None:
    """The same argmax, and log-probabilities within `tolerance`, as the exporter's own dequantised model."""
    reference = load_file(DATA / f"{checkpoint}.reference.safetensors")
    expected = reference["reference.logits_dequantised_fp32"]
    actual = TinyQwen3Moe(folder, tp_size).logits(reference["reference.input_ids"])
    assert actual.shape == expected.shape == (1, 16, 320)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=tolerance)
