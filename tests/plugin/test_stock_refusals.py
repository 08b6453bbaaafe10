"""Stock vLLM never serves a prepared folder that does not fit: each start stops with what is wrong and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stock_run import DATA, convert, launch, options, require_stock_vllm, start

from synthetic import Synthetic, write_checkpoint

CHECKPOINT = DATA / "autoawq-gemm-g64-qwen3moe"
BANK = "sm70/tp1/rank0/layer-00000.safetensors"
PREPARED = {"load_format": "sm70_prepared"}


class Attempt(NamedTuple):
    """A way to spoil a folder, how to start on it, and what must be said. {folder} stands for its path."""

    spoil: Callable[[Path], object]
    engine: dict[str, Any]
    expected: tuple[str, ...]


def _as_it_is(_: Path) -> None:
    pass


def _miss_bank(folder: Path) -> None:
    (folder / BANK).unlink()


def _cut_bank(folder: Path) -> None:
    with (folder / BANK).open("r+b") as file:
        file.truncate((folder / BANK).stat().st_size - 1)


def _alter_bank(folder: Path) -> None:
    data = bytearray((folder / BANK).read_bytes())
    data[-1] ^= 1
    (folder / BANK).write_bytes(data)


def _edit_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def _other_version(config: dict[str, Any]) -> None:
    config["quantization_config"]["sm70_prepared"]["format_version"] = 2


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(CHECKPOINT, folder)


OWN = "No WNA16 MoE backend supports the deployment configuration"
NO_BANKS = (
    "this is a prepared folder, and this load format fills no banks",
    "next: start with --load-format sm70_prepared",
)
ATTEMPTS = {
    "missing bank": Attempt(
        _miss_bank,
        PREPARED,
        (f"{BANK} layer 0 rank 0: bank is missing: No such file", "sm70-convert verify {folder} --rank 0"),
    ),
    "truncated bank": Attempt(_cut_bank, PREPARED, (f"{BANK} layer 0 rank 0: bank is truncated: expected ",)),
    "altered bank": Attempt(
        _alter_bank,
        {**PREPARED, "model_loader_extra_config": {"verify": True}},
        (f"({BANK}) rank 0: has other bytes than the manifest says", "next: restore the file from a good copy"),
    ),
    "other format version": Attempt(
        _edit_config(_other_version),
        PREPARED,
        (
            "sm70_prepared has another format version: expected 1, found 2",
            "next: install the sm70-convert that wrote it",
        ),
    ),
    "other shape": Attempt(
        _edit_config(lambda c: c.update(moe_intermediate_size=256)),
        PREPARED,
        ("expected (8, 256, 128), found (8, 256, 256)", "next: config.json is not that of the checkpoint"),
    ),
    "load format hf": Attempt(_as_it_is, {"load_format": "hf"}, NO_BANKS),
    "load format dummy": Attempt(_as_it_is, {"load_format": "dummy"}, NO_BANKS),
    "source checkpoint": Attempt(_no_folder, PREPARED, ("{folder}: is not a prepared folder", "--out DIR --tp-size N")),
}


@pytest.fixture(scope="module", autouse=True)
def _stock() -> None:
    require_stock_vllm()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder for TP 1."""
    return convert(CHECKPOINT, tmp_path_factory.mktemp("whole") / "prepared", 1)


@pytest.fixture(scope="module")
def errors(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What each attempt said: all in one process, since a start takes seconds. The last one, on a whole folder, must go well."""
    root = tmp_path_factory.mktemp("spoilt")
    requests = []
    for name, attempt in {**ATTEMPTS, "whole": Attempt(_as_it_is, PREPARED, ())}.items():
        shutil.copytree(prepared, root / name)
        attempt.spoil(root / name)
        requests.append({"model": str(root / name), "engine": options(dtype="float16", **attempt.engine)})
    result, log = launch(root, {"attempts": requests}, {})
    assert result is not None, log[-4000:]
    assert result["errors"][-1] is None
    return {
        name: text and text.replace(str(root / name), "{folder}")
        for name, text in zip(ATTEMPTS, result["errors"], strict=False)
    }


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_stops_a_start(name: str, errors: dict[str, str | None]) -> None:
    text = errors[name]
    assert text is not None
    for part in ATTEMPTS[name].expected:
        assert part in text


def test_wrong_tp_size(prepared: Path, tmp_path: Path) -> None:
    result, log = start(tmp_path, prepared, options(dtype="float16", tp_size=2, **PREPARED))
    assert result is None
    assert "has no banks for TP size 2: expected TP size 1, found 2" in log
    assert f"next: start with --tensor-parallel-size 1, or add banks: sm70-convert MODEL --out {prepared}" in log


def test_expert_parallelism(tmp_path: Path) -> None:
    folder = convert(CHECKPOINT, tmp_path / "prepared", 2)
    engine = options(dtype="float16", tp_size=2, enable_expert_parallel=True, **PREPARED)
    result, log = start(tmp_path, folder, engine)
    assert result is None
    assert "expert parallelism is not supported" in log
    assert "next: start without --enable-expert-parallel" in log


def test_without_the_plugin(prepared: Path, tmp_path: Path) -> None:
    """vLLM does not know the load format. By its own it has no experts' kernel on a CPU; elsewhere it meets the sentinel."""
    # Here a model without quantised layers stands for a runtime that has all kernels: experts are just other parameters.
    spec = Synthetic("awq", layers=1, experts=4, hidden=64, intermediate=64, group_size=32, top_k=2, vocab=64)
    write_checkpoint(tmp_path / "source", spec)
    other = convert(tmp_path / "source", tmp_path / "other", 1)
    _edit_config(lambda c: c.pop("quantization_config"))(other)
    attempts = [(prepared, PREPARED), (prepared, {"load_format": "auto"}), (other, {"load_format": "auto"})]
    requests = [{"model": str(folder), "engine": options(dtype="bfloat16", **how)} for folder, how in attempts]
    result, log = launch(tmp_path, {"attempts": requests}, {"VLLM_PLUGINS": ""})
    assert result is not None, log[-4000:]
    for error, part in zip(
        result["errors"],
        ("Load format `sm70_prepared` is not supported", OWN, "sm70_prepared_checkpoint"),
        strict=True,
    ):
        assert error is not None
        assert part in error
