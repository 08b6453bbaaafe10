"""The benchmarks: synthetic checkpoints, the naive way's bytes, and a comparison on tiny sizes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert_vs_cp
import gpu_kernels
import hashing
import kernels
import naive
import soak
import stages
import synthetic
import verify_vs_read
from sm70_kernels import reference
from sm70_kernels.spec import Projection

GOLDEN = Path(__file__).parent / "golden"
FORMATS = ("awq", "nvfp4", "w4a16_nvfp4")


def tiny(format: str, **changes: Any) -> synthetic.Synthetic:  # noqa: A002
    sizes = {
        "layers": 2,
        "experts": 4,
        "hidden": 128,
        "intermediate": 256,
        "group_size": 32,
        "vocab": 64,
        "shards": 3,
    }
    return synthetic.Synthetic(format=format, **(sizes | changes))  # type: ignore[arg-type]


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("format", FORMATS)
def test_synthetic_shards_are_what_safetensors_writes(tmp_path: Path, format: str) -> None:  # noqa: A002
    spec = tiny(format, first_dense=1, shared_expert=True)
    synthetic.write_checkpoint(tmp_path, spec)
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [path.name for path in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    total = 0
    for path in shards:
        tensors = load_file(path)
        total += sum(tensor.nbytes for tensor in tensors.values())
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(tensors)
        save_file(tensors, tmp_path / "again", metadata={"format": "pt"})
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert total == index["metadata"]["total_size"]


@pytest.mark.parametrize("format", FORMATS)
def test_synthetic_values(tmp_path: Path, format: str) -> None:  # noqa: A002
    spec = tiny(format, shards=1)
    for name in ("a", "b"):
        synthetic.write_checkpoint(tmp_path / name, spec)
    assert not (tmp_path / "a" / "model.safetensors.index.json").exists()
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    tensors = load(tmp_path / "a")
    big = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values() if tensor.nbytes > 4]
    assert len(set(big)) == len(big)
    for name, tensor in tensors.items():
        if name.endswith(".scales"):
            assert tensor.dtype == torch.float16
            assert 0.0009 < tensor.min() <= tensor.max() < 0.0201
        elif name.endswith(".weight_scale"):
            assert tensor.view(torch.uint8).min() >= 0x30
            assert tensor.view(torch.uint8).max() <= 0x7E
        elif name.endswith(".weight_scale_2"):
            assert 1e-4 <= tensor <= 5e-4
        elif tensor.dtype in (torch.int32, torch.uint8):
            low = tensor.view(torch.uint8).numpy() & 15
            assert len(np.unique(low)) == 16
    assert any(name.endswith("input_scale") for name in tensors) == (format == "nvfp4")


def test_synthetic_tensor_larger_than_the_random_block(tmp_path: Path) -> None:
    spec = tiny("awq", layers=1, experts=1, hidden=4096, intermediate=4096, group_size=128)
    synthetic.write_checkpoint(tmp_path, spec)
    weight = load(tmp_path)["model.layers.0.mlp.experts.0.up_proj.qweight"]
    assert weight.nbytes > 4 * synthetic.BLOCK_ITEMS
    assert len(torch.unique(weight)) > 0.9 * synthetic.BLOCK_ITEMS


def test_synthetic_like_globals(tmp_path: Path) -> None:
    for like in (True, False):
        synthetic.write_checkpoint(tmp_path / str(like), tiny("nvfp4", like_globals=like))
        tensors = load(tmp_path / str(like))
        prefix = "model.layers.1.mlp.experts.2."
        gate, up, down = (tensors[f"{prefix}{name}_proj.weight_scale_2"] for name in ("gate", "up", "down"))
        assert torch.equal(gate, up) is like
        assert gate != down


@pytest.mark.parametrize(
    ("source", "banks"),
    [
        ("moe_awq_h128_i256_g64.hf", "moe_awq_h128_i256_g64.tp2.interleaved"),
        ("moe_awq_h128_i512_g128.hf", "moe_awq_h128_i512_g128.tp4.interleaved"),
        ("moe_nvfp4_h128_i128.hf", "moe_nvfp4_h128_i128.tp2"),
    ],
)
def test_naive_gives_the_recorded_banks(tmp_path: Path, source: str, banks: str) -> None:
    recorded = load_file(GOLDEN / f"{banks}.safetensors")
    model = {f"model.layers.0.mlp.{name}": t for name, t in load_file(GOLDEN / f"{source}.safetensors").items()}
    (tmp_path / "model").mkdir()
    save_file(model, tmp_path / "model" / "model.safetensors")
    tp_size = 1 + max(int(name[4]) for name in recorded)
    naive.naive_convert(tmp_path / "model", tmp_path / "out", tp_size)
    for rank in range(tp_size):
        made = load_file(tmp_path / "out" / f"tp{tp_size}" / f"rank{rank}" / "layer-00000.safetensors")
        assert {f"rank{rank}.{name}" for name in made} == {n for n in recorded if n.startswith(f"rank{rank}.")}
        for name, tensor in made.items():
            wanted = recorded[f"rank{rank}.{name}"]
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), f"rank {rank} {name}"


@pytest.mark.parametrize(
    ("format", "layout", "interleave"), [("awq", "awq-half2", True), ("nvfp4", "nvfp4-fp16", False)]
)
def test_naive_agrees_with_the_reference(tmp_path: Path, format: str, layout: str, interleave: bool) -> None:  # noqa: A002
    synthetic.write_checkpoint(tmp_path / "model", tiny(format, first_dense=1))
    naive.naive_convert(tmp_path / "model", tmp_path / "out", 2)
    tensors = load(tmp_path / "model")
    assert not (tmp_path / "out" / "tp2" / "rank0" / "layer-00000.safetensors").exists()
    for rank in range(2):
        with safe_open(tmp_path / "out" / "tp2" / f"rank{rank}" / "layer-00001.safetensors", "pt") as made:
            for expert in range(4):
                projections = [projection(tensors, expert, name) for name in ("gate", "up", "down")]
                wanted = reference.prepare_rank(
                    *projections, layout=layout, interleave=interleave, rank=rank, tp_size=2
                )
                assert set(wanted) == set(made.keys())
                for name, tensor in wanted.items():
                    bank = made.get_slice(name)[expert]
                    assert torch.equal(bank.view(torch.uint8), tensor.view(torch.uint8)), f"expert {expert} {name}"


def projection(tensors: dict[str, torch.Tensor], expert: int, name: str) -> Projection:
    prefix = f"model.layers.1.mlp.experts.{expert}.{name}_proj."
    if f"{prefix}qweight" in tensors:
        weight, zeros = (tensors[prefix + part].numpy().view(np.uint32) for part in ("qweight", "qzeros"))
        return Projection(weight, tensors[f"{prefix}scales"].numpy().view(np.uint16), zeros, None)
    codes = tensors[f"{prefix}weight_scale"].view(torch.uint8).numpy()
    return Projection(tensors[f"{prefix}weight"].numpy(), codes, None, np.float32(tensors[f"{prefix}weight_scale_2"]))


def test_convert_vs_cp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("cp") is None:
        pytest.skip("no cp")
    script = Path(convert_vs_cp.__file__).with_name("naive.py")
    command = f"{{python}} {script} {{model}} {{out}} {{tp_sizes}}"
    sizes = "--layers 1 --layers-growth 2 --experts 2 --hidden 64 --intermediate 128 --group-size 32"
    arguments = [*sizes.split(), "--pairs", "1", "--work", str(tmp_path), "--command", command]
    assert convert_vs_cp.main([*arguments, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["output_bytes"] > 2 * 3 * 64 * 128 // 2
    assert figures["ratio"] == figures["pairs"][0]["cp_seconds"] / figures["pairs"][0]["seconds"]
    assert figures["naive_ratio"] > 0
    assert figures["tp_sizes"] == [4]
    assert "growth_percent" in figures
    assert "peak_rss_mb" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_convert_vs_cp_checks() -> None:
    good = {"format": "awq", "tp_sizes": [4], "ratio": 1.15, "peak_rss_mb": 119.0, "naive_ratio": 8.0}
    assert convert_vs_cp.failures(good) == []
    assert convert_vs_cp.failures(good | {"format": "nvfp4", "ratio": 1.0, "naive_ratio": 1.0}) == []
    assert convert_vs_cp.failures(good | {"tp_sizes": [1, 2], "ratio": 0.87}) == []
    for name, bad in (
        ("ratio", {"ratio": 1.149}),
        ("ratio", {"tp_sizes": [1, 2], "ratio": 0.869}),
        ("ratio", {"format": "nvfp4", "ratio": 0.999}),
        ("peak_rss_mb", {"growth_peak_rss_mb": 120.0}),
        ("naive_ratio", {"naive_ratio": 7.9}),
    ):
        (line,) = convert_vs_cp.failures(good | bad)
        assert line.startswith(f"FAILED {name}:")


def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHAPES", {"A": (256, 512, (1, 4)), "B": (64, 32, (1,))})
    assert kernels.main(["--seconds", "0.0001", "--json", str(tmp_path / "figures.json")]) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert {row["kernel"] for row in rows} == {"naive", *kernels.kernels()}
    assert {row["layout"] for row in rows} >= {*kernels.AWQ, *kernels.NVFP4}
    assert all(row["of_memcpy"] > 0 and row["of_naive"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    monkeypatch.setattr(kernels, "WANTED", {"awq-half2": 1e9})
    assert len(kernels.failures(rows)) == sum(r["kernel"] == "cpp" and r["layout"] == "awq-half2" for r in rows)


SMALL = ["--layers=1", "--experts=2", "--hidden=64", "--intermediate=128", "--group-size=32", "--shards=1"]


def test_hashing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        hashing.main([*SMALL, "--rounds", "1", "--work", str(tmp_path), "--json", str(tmp_path / "figures.json")]) == 0
    )
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["hash"] for row in rows] == ["none", "blake3", "sha256"]
    assert rows[0]["wall_over_none"] == 1
    assert rows[1]["gb_per_cpu_second"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--experts=2", "--hidden=64", "--intermediate=128", "--group-size=32", "--work", str(tmp_path)]
    assert stages.main([*arguments, "--json", str(tmp_path / "figures.json")]) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["run"] for row in rows] == ["AWQ, TP 4", "AWQ, TP 1, 2 and 4", "NVFP4, TP 4", "NVFP4, TP 1, 2 and 4"]
    assert all(list(row["milliseconds"]) == list(stages.STAGES) for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_verify_vs_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*SMALL, "--pairs", "2", "--work", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    assert verify_vs_read.main(arguments) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["pairs"]) == 2
    assert figures["bytes"] > 2 * 3 * 64 * 128 // 2
    assert f"ratio {figures['ratio']:.3f}" in capsys.readouterr().out
    monkeypatch.setattr(verify_vs_read, "MIN_RATIO", 1e9)
    assert verify_vs_read.main([*arguments, "--check"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED ratio: ")


def test_gpu_kernels_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_kernels.main(["--json", str(tmp_path / "figures.json")]) == 2
    assert capsys.readouterr().out == "no CUDA device is here: nothing was run\n"
    assert list(tmp_path.iterdir()) == []


def test_measure() -> None:
    run = convert_vs_cp.measure([sys.executable, "-c", "x = bytearray(b'x') * 100_000_000"])
    assert run.peak_rss_mb > 100
    assert run.cpu_seconds > 0
    with pytest.raises(SystemExit, match="exit code 3"):
        convert_vs_cp.measure([sys.executable, "-c", "raise SystemExit(3)"])


def test_comparison_imports_the_standard_library_alone() -> None:
    """Its own RSS would be the floor of what it measures."""
    program = "import sys, convert_vs_cp; sys.exit('numpy' in sys.modules)"
    folder = Path(convert_vs_cp.__file__).parent
    assert subprocess.run([sys.executable, "-c", program], cwd=folder).returncode == 0


def test_soak_kills_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tmp_path / "soak.json"
    arguments = ["soak.py", str(tmp_path / "work"), "--rounds", "8", "--megabytes", "20", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        soak.main()
    document = json.loads(figures.read_text())
    assert ended.value.code == document["differences"] == 0
    assert document["rounds"] == sum(document[f"rounds_{kind}"] for kind in soak.KINDS) == 8
    assert document["kills"] > 0
    assert not (tmp_path / "work").exists()


def test_soak_finds_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.py", str(tmp_path / "work"), "--rounds", "1", "--megabytes", "20"])
    expected = soak.Soak.expected

    def other(self: soak.Soak, *of: Any) -> tuple[dict[str, str], float]:
        files, seconds = expected(self, *of)
        return files | {"config.json": "another digest"}, seconds

    monkeypatch.setattr(soak.Soak, "expected", other)
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert ended.value.code == 1


def test_the_figures_of_the_last_soak_stand_in_the_documentation() -> None:
    docs = Path(__file__).parent.parent / "docs"
    document = json.loads((docs / "soak.json").read_text())
    assert document["rounds"] >= 200
    assert document["checkpoint_bytes"] >= 300_000_000
    assert document["differences"] == 0
    text = (docs / "reliability.md").read_text()
    for key, value in document.items():
        assert f"    {key:<28}{value:>12}\n" in text
