"""A prepared folder as the plugin reads it: the right bank, and every check. No vLLM is needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from sm70_convert.cli import main
from sm70_convert.errors import IntegrityError, Sm70Error, UnsupportedError
from sm70_convert.vllm_plugin import folder as folder_module
from sm70_convert.vllm_plugin.folder import PreparedFolder, current, is_loading, loading
from synthetic import Format, Synthetic, write_checkpoint

LAYOUTS = {"awq-half2": "awq", "awq-compact": "awq", "awq-int4zero": "awq", "nvfp4-fp16": "nvfp4", "nvfp4-raw": "nvfp4"}
BANK = "sm70/tp2/rank1/layer-00001.safetensors"


def convert(root: Path, layout: str, format_: Format) -> Path:
    spec = Synthetic(
        format=format_, layers=2, experts=4, hidden=128, intermediate=128, top_k=2, group_size=32, vocab=64
    )
    write_checkpoint(root / "source", spec)
    options = ["--tp-size", "1", "--tp-size", "2", "--layout", layout, "--interleave", "off", "-q", "--allow-nonfinite"]
    result = CliRunner().invoke(main, [str(root / "source"), "--out", str(root / "out"), *options])
    assert result.exit_code == 0, result.stderr
    return root / "out"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("sealed"), "awq-half2", "awq")


@pytest.fixture
def copy(sealed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sealed, tmp_path / "copy"))


def opened(path: Path, *, verify: bool = False) -> PreparedFolder:
    folder = PreparedFolder.open(path, verify=verify)
    assert folder is not None
    return folder


def fill(folder: PreparedFolder, layer: int = 1, rank: int = 1, tp_size: int = 2) -> dict[str, torch.Tensor]:
    parameters = folder.empty_parameters(layer, rank, tp_size)
    folder.fill(parameters, layer, rank, tp_size)
    return parameters


@pytest.mark.parametrize("window", [folder_module.WINDOW, 4096])
@pytest.mark.parametrize("layout", ["awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16"])
def test_parameters_get_the_bytes_of_their_bank(
    layout: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "WINDOW", window)
    folder = opened(convert(tmp_path, layout, "awq" if layout.startswith("awq") else "nvfp4"), verify=True)
    compared = total = 0
    for tp_size in (1, 2):
        for rank in range(tp_size):
            for layer in (0, 1):
                filled = fill(folder, layer, rank, tp_size)
                wanted = load_file(folder.root / f"sm70/tp{tp_size}/rank{rank}/layer-{layer:05d}.safetensors")
                assert filled.keys() == wanted.keys() == set(folder.tensor_names)
                for name, tensor in wanted.items():
                    assert filled[name].dtype == tensor.dtype
                    assert torch.equal(filled[name].view(torch.uint8), tensor.view(torch.uint8))
                    compared += 1
                    total += tensor.nbytes
    assert compared == 6 * 4
    assert folder.report.bytes == total
    assert folder.report.layers == {0, 1}
    assert folder.report.seconds > 0


def test_what_is_not_prepared_is_none(tmp_path: Path, sealed: Path) -> None:
    assert PreparedFolder.open(sealed.parent / "source") is None
    assert PreparedFolder.open(tmp_path / "nowhere") is None
    assert PreparedFolder.open("org/name") is None


def test_layers_are_known_by_their_module(sealed: Path) -> None:
    folder = opened(sealed)
    assert folder.layer_of("model.layers.1.mlp.experts") == 1
    assert folder.layer_of("language_model.model.layers.0.mlp.experts") == 0
    assert folder.layer_of("model.layers.1.mlp.experts.routed_experts") == 1
    for other in ("model.layers.2.mlp.experts", "mtp.layers.0.mlp.experts", "model.layers.1.mlp.shared_expert"):
        assert folder.layer_of(other) is None


def stopped(kind: type[Sm70Error], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return "\n".join(caught.value.lines())


def test_tp_size_without_banks(sealed: Path) -> None:
    text = stopped(UnsupportedError, lambda: opened(sealed).bank(0, 0, 4))
    assert "has no banks for TP size 4: expected TP size 1 or 2, found 4" in text
    assert (
        f"next: start with --tensor-parallel-size 1, or add banks: sm70-convert MODEL --out {sealed} --tp-size 4"
        in text
    )


def test_other_shape(sealed: Path) -> None:
    def check(experts: int, hidden: int, intermediate: int) -> None:
        opened(sealed).check_shape(0, 2, experts=experts, hidden=hidden, intermediate=intermediate)

    check(4, 128, 64)
    for wrong in ((4, 128, 128), (2, 128, 64), (4, 64, 64)):
        assert f"expected (4, 128, 64), found {wrong}" in stopped(UnsupportedError, lambda w=wrong: check(*w))
    assert "start without --enable-expert-parallel" in stopped(UnsupportedError, lambda: check(2, 128, 128))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "bank is missing: No such file or directory"),
        (lambda p: p.write_bytes(p.read_bytes()[:-8]), "bank is truncated: expected "),
        (lambda p: p.write_bytes(p.read_bytes() + b"\0"), "bank has the wrong size: expected "),
        (
            lambda p: p.write_bytes(p.read_bytes().replace(b'rank\\":1', b'rank\\":0')),
            "bank's header is not what the manifest",
        ),
    ],
)
def test_bank_file_is_not_as_sealed(copy: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copy / BANK)
    folder = opened(copy)
    fill(folder, rank=0)
    text = stopped(IntegrityError, lambda: fill(folder))
    assert f"error: {BANK} layer 1 rank 1: {message}" in text
    assert f"next: copy it again from a good folder (sm70-convert verify {copy} --rank 1" in text


def test_altered_bytes_are_found_when_asked(copy: Path) -> None:
    data = bytearray((copy / BANK).read_bytes())
    data[-1] ^= 1
    (copy / BANK).write_bytes(data)
    fill(opened(copy))
    text = stopped(IntegrityError, lambda: fill(opened(copy, verify=True)))
    assert f"w2_tm_weight ({BANK}) rank 1: has other bytes than the manifest says: expected " in text


def test_parameters_must_be_those_of_the_bank(sealed: Path) -> None:
    folder = opened(sealed)
    for change, found in (
        ({"w2_tm_scales": torch.empty(4, 2, 128, dtype=torch.float16)}, "found (torch.float16, (4, 2, 128))"),
        ({"w2_tm_scales": torch.empty(4, 2, 64, dtype=torch.int32)}, "found (torch.int32, (4, 2, 64))"),
        ({"other": torch.empty(1)}, "expected None, found (torch.float32, (1,))"),
    ):
        parameters = folder.empty_parameters(0, 0, 2) | change
        assert found in stopped(UnsupportedError, lambda p=parameters: folder.fill(p, 0, 0, 2))
    assert folder.report.layers == set()


def edit_config(root: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((root / "config.json").read_text())
    change(config["quantization_config"])
    (root / "config.json").write_text(json.dumps(config))


def test_folder_that_is_unfinished_or_altered(copy: Path) -> None:
    edit_config(copy, lambda q: q["sm70_prepared"].update(format_version=9))
    text = stopped(IntegrityError, lambda: PreparedFolder.open(copy))
    assert "config.json: sm70_prepared has another format version: expected 1, found 9" in text
    edit_config(copy, lambda q: q.pop("sm70_prepared"))
    assert "has no sm70_prepared in its quantization_config" in stopped(
        IntegrityError, lambda: PreparedFolder.open(copy)
    )
    edit_config(copy, lambda q: q.update(sm70_prepared={"format_version": 1}))
    manifest = copy / "sm70/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"hidden": 128', b'"hidden": 256'))
    assert "was altered or damaged" in stopped(IntegrityError, lambda: PreparedFolder.open(copy))
    manifest.unlink()
    assert "not a sealed folder: finish it" in stopped(IntegrityError, lambda: PreparedFolder.open(copy))


def test_passthrough_file_is_not_as_sealed(copy: Path) -> None:
    opened(copy).check_passthrough()
    shard = next(copy.glob("model*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"error: {shard.name}: is truncated: expected " in stopped(IntegrityError, opened(copy).check_passthrough)
    shard.unlink()
    assert f"error: {shard.name}: is missing: expected " in stopped(IntegrityError, opened(copy).check_passthrough)


def test_unlisted_tensors_are_the_sentinel_and_what_the_index_leaves_out(copy: Path) -> None:
    sentinel = "sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"
    assert opened(copy).unlisted() == {sentinel}
    index = copy / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(document))
    assert opened(copy).unlisted() == {sentinel, "model.norm.weight"}


def test_current_folder(sealed: Path) -> None:
    folder = opened(sealed)
    assert current() is None
    assert not is_loading()
    with loading(folder):
        assert current() is folder
        with loading(None):
            assert current() is None
            assert is_loading()
        assert current() is folder
    assert not is_loading()
