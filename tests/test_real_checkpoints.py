"""Checkpoints by real exporters, whole: banks against the exporter's own dequantised weights, and every tensor accounted for."""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from sm70_convert import names
from sm70_convert.cli import main
from sm70_kernels import reference

DATA = Path(__file__).parent / "data"
CHECKPOINTS = sorted(p.name for p in DATA.iterdir() if p.is_dir())
AWQ = [name for name in CHECKPOINTS if "awq" in name]
TP_SIZES = (1, 2, 4)
REFUSED = ("autoawq-gemm-g64-qwen3moe", 4)  # 32 channels a rank do not divide by groups of 64


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


def size_options(name: str) -> list[object]:
    return [a for t in TP_SIZES if (name, t) != REFUSED for a in ("--tp-size", t)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every checkpoint prepared at every TP size that it allows."""
    root = tmp_path_factory.mktemp("prepared")
    for name in CHECKPOINTS:
        run(DATA / name, "--out", root / name, *size_options(name))
    return {name: root / name for name in CHECKPOINTS}


@cache
def source_tensors(name: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that its index lists."""
    index = DATA / name / "model.safetensors.index.json"
    if not index.exists():
        return load_file(DATA / name / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = {file: load_file(DATA / name / file) for file in sorted(set(weight_map.values()))}
    return {tensor: shards[file][tensor] for tensor, file in weight_map.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def dequantised_expert(folder: Path, tp_size: int, layer: int, expert: int) -> dict[str, torch.Tensor]:
    """gate, up and down of one expert, [N, K] in fp32, joined from the banks of all ranks."""
    parts: dict[str, list[torch.Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for rank in range(tp_size):
        path = folder / f"sm70/tp{tp_size}/rank{rank}/layer-{layer:05d}.safetensors"
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["sm70_bank"])
            tensors = {name: file.get_tensor(name)[expert] for name in file.keys()}  # noqa: SIM118
        found = reference.dequantise(tensors, layout=about["layout"], interleave=about["interleave_gate_up"])
        for name, value in zip(parts, found, strict=True):
            parts[name].append(value)
    return {name: torch.cat(values, dim=1 if name == "down_proj" else 0) for name, values in parts.items()}


def nvfp4_with_fp16_scales(name: str, tensor: str) -> torch.Tensor:
    """The source's weight [N, K] with its combined scales rounded to fp16, straight from the definition of NVFP4."""
    stem = tensor.removesuffix(".weight")
    source = source_tensors(name)
    packed, codes, factor = (source[f"{stem}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], -1).long()
    scales = (codes.float() * factor.reshape(())).half().float()
    return values[nibbles] * scales.repeat_interleave(16, dim=1)


def expert_weights(name: str) -> list[tuple[str, int, int, str]]:
    """(tensor, layer, expert, projection) of every expert weight in the exporter's reference."""
    with safe_open(DATA / f"{name}.reference.safetensors", "pt") as file:
        parsed = [(t, names.parse(t)) for t in sorted(file.keys())]
    return [(t, p.layer, p.expert, f"{p.projection}_proj") for t, p in parsed if p is not None and p.expert is not None]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_banks_dequantise_to_the_exporters_weights(name: str, folders: dict[str, Path]) -> None:
    weights = load_file(DATA / f"{name}.reference.safetensors")
    compared = 0
    for tp_size in (t for t in TP_SIZES if (name, t) != REFUSED):
        for tensor, layer, expert, projection in expert_weights(name):
            found = dequantised_expert(folders[name], tp_size, layer, expert)[projection]
            if name in AWQ:
                assert torch.equal(found, weights[tensor])
            else:
                assert torch.equal(found, nvfp4_with_fp16_scales(name, tensor))
                torch.testing.assert_close(found, weights[tensor], rtol=2**-11, atol=0)
            compared += 1
    assert compared == 4 * (2 if name == REFUSED[0] else 3)


def test_the_size_that_breaks_groups_is_refused(tmp_path: Path) -> None:
    name, tp_size = REFUSED
    result = CliRunner().invoke(main, [str(DATA / name), "--out", str(tmp_path / "out"), "--tp-size", str(tp_size)])
    assert result.exit_code == 4
    assert result.stderr == (
        "error: model.layers.0.mlp.experts.0.gate_proj.qweight: TP size 4 is not possible: each rank would hold 32 of the 128 "
        "intermediate channels, not a multiple of the group size 64\n"
        "next: TP sizes that work for this checkpoint: 1, 2\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_verify_passes_with_the_source(name: str, folders: dict[str, Path]) -> None:
    document = json.loads(run("verify", folders[name], "--source", DATA / name, "--json"))
    moe = json.loads((folders[name] / "sm70/manifest.json").read_text())["moe"]
    layers, ranks = len(names.parse_ranges(moe["layers"])), sum(t for t in TP_SIZES if (name, t) != REFUSED)
    assert document["experts"] == layers * moe["experts"]
    assert document["tensors"] == layers * moe["experts"] * ranks * 4
    sampled = json.loads(run("verify", folders[name], "--source", DATA / name, "--sample", 2, "--json"))
    assert sampled["experts"] == layers * 2


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_source_tensor_is_banked_or_passed_or_dropped(name: str, folders: dict[str, Path]) -> None:
    source = source_tensors(name)
    manifest = json.loads((folders[name] / "sm70/manifest.json").read_text())

    def expand(record: dict[str, str]) -> set[str]:
        return {record["name"].replace("{expert}", str(e)) for e in names.parse_ranges(record["experts"])}

    banked = {t for layer in manifest["layers"].values() for s in layer["sources"] for t in expand(s)}
    dropped = {t for record in manifest["dropped"] for t in expand(record)}
    index = json.loads((folders[name] / "model.safetensors.index.json").read_text())
    sentinel = {t for t, file in index["weight_map"].items() if file == "sm70-sentinel.safetensors"}
    passed = set(index["weight_map"]) - sentinel
    assert sentinel == {"sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"}
    assert banked | passed | dropped == set(source)
    assert len(banked) + len(passed) + len(dropped) == len(source)
    total = 1
    for file in sorted(set(index["weight_map"].values()) - {"sm70-sentinel.safetensors"}):
        for tensor, value in load_file(folders[name] / file).items():
            assert index["weight_map"][tensor] == file
            assert value.dtype == source[tensor].dtype
            assert value.shape == source[tensor].shape
            assert torch.equal(as_bytes(value), as_bytes(source[tensor]))
            total += value.numel() * value.element_size()
            passed.discard(tensor)
    assert not passed
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_other_files_and_config_are_handed_on(name: str, folders: dict[str, Path]) -> None:
    for path in (DATA / name).iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "model.safetensors.index.json"):
            assert (folders[name] / path.name).read_bytes() == path.read_bytes()
    config = json.loads((folders[name] / "config.json").read_text())
    marker = config["quantization_config"].pop("sm70_prepared")
    assert marker == {"format_version": 1, "manifest": "sm70/manifest.json"}
    assert list(config.items()) == list(json.loads((DATA / name / "config.json").read_text()).items())


@pytest.mark.parametrize("kernel", ["numpy", "torch"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_kernel_gives_the_same_folder(name: str, kernel: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """`folders` were made with the C++ kernel, where it was built."""
    run(DATA / name, "--out", tmp_path / "out", *size_options(name), "--kernel", kernel, "-q")
    made, wanted = (
        {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        for root in (tmp_path / "out", folders[name])
    )
    assert made == wanted


def test_nothing_in_a_sealed_folder_tells_where_or_when(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        assert {p.name for p in (folder / "sm70").iterdir() if p.is_file()} == {"manifest.json"}
        for path in folder.rglob("*"):
            assert not path.name.startswith(".")
            if path.is_file():
                assert str(DATA).encode() not in path.read_bytes(), (name, path)
                assert str(folder.parent).encode() not in path.read_bytes(), (name, path)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_any_flipped_bit_of_a_bank_is_found_and_named(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(folders[name], folder)
    chosen = random.Random(name)  # noqa: S311 - which bits, not a secret
    for bank in sorted(folder.glob("sm70/tp*/rank*/*.safetensors")):
        data = bytearray(bank.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        with safe_open(bank, "np") as file:
            spans = json.loads(data[8:start])
            tensors = sorted(file.keys())
        places: list[tuple[int, str | None]] = [(chosen.randrange(8), None), (chosen.randrange(8, start), None)]
        places += [(start + chosen.randrange(*spans[t]["data_offsets"]), t) for t in tensors]
        for place, tensor in places:
            bit = 1 << chosen.randrange(8)
            data[place] ^= bit
            bank.write_bytes(data)
            result = CliRunner().invoke(main, ["verify", str(folder), "--jobs", "1"])
            data[place] ^= bit
            assert result.exit_code == 6, (bank, place, bit)
            assert str(bank.relative_to(folder)) in result.stderr
            if tensor is not None:
                assert f"{tensor} (" in result.stderr
                assert "has other bytes than the manifest says" in result.stderr
        bank.write_bytes(data)
    assert CliRunner().invoke(main, ["verify", str(folder)]).exit_code == 0


def test_compact_layouts_expand_to_the_same_half2_banks(folders: dict[str, Path], tmp_path: Path) -> None:
    name, compared = "gptqmodel-awq-gemm-g32-qwen3moe", 0
    for layout, expand in (("awq-compact", reference.expand_compact), ("awq-int4zero", reference.expand_int4zero)):
        out = tmp_path / layout
        run(DATA / name, "--out", out, "--tp-size", 2, "--layout", layout)
        for rank in range(2):
            path = f"sm70/tp2/rank{rank}/layer-00000.safetensors"
            with safe_open(out / path, "pt") as file:
                about = json.loads(file.metadata()["sm70_bank"])
            assert about["w13_q_ld"] == -128
            assert about["w2_q_ld"] == -256
            small, plain = load_file(out / path), load_file(folders[name] / path)
            for matrix in ("w13", "w2"):
                assert torch.equal(small[f"{matrix}_tm_weight"], plain[f"{matrix}_tm_weight"])
                for expert in range(8):
                    expanded = expand(small[f"{matrix}_tm_scales"][expert])
                    assert torch.equal(expanded, plain[f"{matrix}_tm_scales"][expert])
                    compared += 1
    assert compared == 2 * 2 * 2 * 8


def test_raw_nvfp4_banks_expand_to_the_fp16_ones_or_are_refused_with_the_tensor(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Real exporters' scales reach codes that raw storage cannot hold; then nothing is sealed."""
    outcomes = set()
    for name in sorted(set(CHECKPOINTS) - set(AWQ)):
        out = tmp_path / name
        result = CliRunner().invoke(
            main, [str(DATA / name), "--out", str(out), "--tp-size", "2", "--layout", "nvfp4-raw"]
        )
        outcomes.add(result.exit_code)
        if result.exit_code != 0:
            assert result.exit_code == 4
            assert "nvfp4-raw would not be exact" in result.stderr
            assert ".weight_scale (model" in result.stderr
            assert "next: convert with --layout nvfp4-fp16" in result.stderr
            assert not (out / "sm70/manifest.json").exists()
            continue
        for path in sorted(out.glob("sm70/tp2/rank*/*.safetensors")):
            small, plain = load_file(path), load_file(folders[name] / path.relative_to(out))
            for matrix in ("w13", "w2"):
                for codes, factors, scales in zip(
                    small[f"{matrix}_raw_scale_codes"],
                    small[f"{matrix}_raw_global_scales"],
                    plain[f"{matrix}_tm_scales"],
                    strict=True,
                ):
                    assert torch.equal(reference.expand_raw(codes, factors), scales)
    assert outcomes <= {0, 4}
    assert outcomes
