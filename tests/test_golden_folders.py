"""The recorded MoE layers through the whole command line: every bank of every recorded TP size, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from expert_banks import raw
from fake_gpu import V100, native_ops, pretend
from sm70_convert.cli import main
from sm70_kernels import reference

GOLDEN = Path(__file__).parent / "golden"
SOURCES = sorted(GOLDEN.glob("moe_*.hf.safetensors"))
RECORDED = sorted(p for p in GOLDEN.glob("moe_*.tp*.safetensors"))
# Counted once by hand, so that a recording that nobody compares does not go unnoticed.
RECORDED_TENSORS = 184


def run(*arguments: object) -> None:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output + result.stderr


def make_checkpoint(source: Path, folder: Path) -> None:
    """A recorded layer as a checkpoint: its names in a decoder layer, and a config.json as exporters write it."""
    with safe_open(source, "pt") as file:
        about = file.metadata()
    hidden, intermediate, experts = (int(about[key]) for key in ("hidden", "intermediate", "experts"))
    awq = about["kind"] == "awq_moe_hf"
    if awq:
        quantization = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": int(about["group_size"]),
            "version": "gemm",
            "zero_point": True,
        }
    else:
        quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": hidden, "moe_intermediate_size": intermediate,
        "num_experts": experts, "num_experts_per_tok": 2, "quantization_config": quantization,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.0.mlp.{name}": tensor for name, tensor in load_file(source).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def recordings_of(source: Path) -> dict[tuple[int, bool], dict[str, torch.Tensor]]:
    """(TP size, interleaved) -> `rank{r}.<bank tensor>`."""
    stem = source.name.removesuffix(".hf.safetensors")
    found = {}
    for path in RECORDED:
        if path.name.startswith(f"{stem}."):
            parts = path.name.removesuffix(".safetensors").split(".")
            found[int(parts[1].removeprefix("tp")), "interleaved" in parts] = load_file(path)
    return found


def compare(source: Path, tmp_path: Path, kernel: str) -> int:
    """Converts one recorded layer at all its TP sizes; gives the number of tensors compared."""
    checkpoint = tmp_path / f"{source.stem}-checkpoint"
    make_checkpoint(source, checkpoint)
    recordings = recordings_of(source)
    compared = 0
    for interleaved in (False, True):
        sizes = sorted(t for t, i in recordings if i == interleaved)
        if not sizes:
            continue
        out = tmp_path / f"{source.stem}-{interleaved}"
        sizes_given = [a for t in sizes for a in ("--tp-size", t)]
        switch = "on" if interleaved else "off"
        # The NVFP4 recordings hold scales that overflow on purpose.
        run(checkpoint, "--out", out, "--interleave", switch, "--allow-nonfinite", "--kernel", kernel, *sizes_given)
        run("verify", out, "--source", checkpoint)
        for tp_size in sizes:
            for rank in range(tp_size):
                bank = out / f"sm70/tp{tp_size}/rank{rank}/layer-00000.safetensors"
                with safe_open(bank, "pt") as file:
                    about = json.loads(file.metadata()["sm70_bank"])
                for name, tensor in load_file(bank).items():
                    expected = raw(recordings[tp_size, interleaved][f"rank{rank}.{name}"])
                    found = raw(tensor)
                    assert found.dtype == expected.dtype
                    assert found.shape == expected.shape
                    assert np.count_nonzero(found != expected) == 0, (bank, name)
                    compared += 1
                k, n = about["hidden_size"], 2 * about["intermediate_size_per_rank"]
                assert (about["w13_k_ld"], about["w13_q_ld"]) == reference.meta(about["layout"], k, n)
                assert (about["w2_k_ld"], about["w2_q_ld"]) == reference.meta(about["layout"], n // 2, k)
    return compared


@pytest.mark.parametrize("kernel", ["auto", "numpy", "torch"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name.removesuffix(".hf.safetensors"))
def test_banks_equal_the_recording(source: Path, kernel: str, tmp_path: Path) -> None:
    expected = sum(len(tensors) for tensors in recordings_of(source).values())
    assert expected > 0
    assert compare(source, tmp_path, kernel) == expected


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name.removesuffix(".hf.safetensors"))
def test_banks_of_the_runtimes_ops_equal_the_recording(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, V100)
    with native_ops() as calls:
        assert compare(source, tmp_path, "native") == sum(len(t) for t in recordings_of(source).values())
    assert calls


def test_every_recording_is_compared() -> None:
    recordings = [tensors for source in SOURCES for tensors in recordings_of(source).values()]
    assert len(recordings) == len(RECORDED)
    assert sum(len(tensors) for tensors in recordings) == RECORDED_TENSORS
