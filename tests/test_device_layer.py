"""Layers prepared on a device, driven on the CPU: the same bytes as one expert at a time, and every way to fail."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.overrides import TorchFunctionMode

import made
from fake_gpu import V100, native_ops, pretend
from sm70_convert import device_layer
from sm70_convert.cli import main
from sm70_kernels import torch_sm70
from sm70_kernels.spec import RawScaleError

DATA = Path(__file__).parent / "data"
REAL = sorted(p for p in DATA.iterdir() if p.is_dir())
HINT = "run again with --device cpu and without --kernel: it resumes, and the banks are the same, bit for bit"


def run(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, (args, result.exit_code, result.output, result.exception)
    return result


def problems(*args: object, code: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(*args, "--json", code=code).stdout)["error"]["problems"]
    return found


def contents(folder: Path) -> dict[str, str]:
    paths = [p for p in sorted(folder.rglob("*")) if not p.is_dir()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.rglob("*") if not p.is_dir()}


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., None]) -> None:
    """What `--kernel torch` runs."""
    monkeypatch.setattr(torch_sm70, "prepare_layer", kernel)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three AWQ layers. Read only."""
    return made.awq(layers=3, intermediate=128, shards=2).write(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the CPU path makes of it at TP 1 and 2."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(model, "--out", out, "--tp-size", 1, "--tp-size", 2, "--kernel", "numpy")
    return contents(out)


def convert(model: Path, out: Path, *args: object, kernel: str = "torch", code: int = 0) -> Result:
    return run(model, "--out", out, "--tp-size", 1, "--tp-size", 2, "--kernel", kernel, *args, code=code)


# The same bytes


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("source", REAL, ids=lambda p: p.name)
def test_real_checkpoints_give_the_bytes_of_the_cpu_path(
    source: Path, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, "--out", tmp_path / "cpu", "--tp-size", 2, "--kernel", "numpy")
    pretend(monkeypatch, V100)
    with native_ops() as calls:
        run(source, "--out", tmp_path / "gpu", "--tp-size", 2, "--kernel", kernel)
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")
    assert bool(calls) == (kernel == "native")


@pytest.mark.parametrize("layout", ["awq-half2", "awq-compact", "awq-int4zero", "nvfp4-fp16", "nvfp4-raw"])
@pytest.mark.parametrize("interleave", ["on", "off"])
@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_every_layout_gives_the_bytes_of_the_cpu_path(
    layout: str, interleave: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made.awq(experts=3) if layout.startswith("awq") else made.nvfp4(experts=3)
    if layout == "nvfp4-raw":
        for name in [n for n in source.tensors if n.endswith("weight_scale_2")]:
            source.change(name, data=made.f32(2.0**-12))
    elif layout == "awq-half2":
        for name in [n for n in source.tensors if n.endswith("scales")]:
            source.change(name, dtype="BF16", data=made.bf16([0.01, 0.0213, 0.3]))
    args = (
        source.write(tmp_path / "model"),
        "--layout",
        layout,
        "--interleave",
        interleave,
        "--tp-size",
        1,
        "--tp-size",
        2,
    )
    run(*args, "--out", tmp_path / "cpu", "--kernel", "numpy")
    pretend(monkeypatch, V100)
    with native_ops():
        run(*args, "--out", tmp_path / "gpu", "--kernel", kernel)
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")


@pytest.mark.parametrize(("first", "second"), [("numpy", "torch"), ("torch", "numpy")])
def test_a_stopped_run_is_resumed_with_another_kernel(
    first: str, second: str, model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real, seen = device_layer.bank_writers, []

        def stop(plan: Any, folder: Any, layer: Any) -> Any:
            seen.append(layer.layer)
            if layer.layer == 2:  # begun only when layer 0 was in the journal
                os.kill(os.getpid(), signal.SIGTERM)
                raise RuntimeError("terminated")
            return real(plan, folder, layer)

        for where in ("sm70_convert.device_layer", "sm70_convert.convert"):
            patch.setattr(f"{where}.bank_writers", stop)
        convert(model, tmp_path / "out", "--jobs", 1, kernel=first, code=143)
        assert seen == [0, 1, 2]
    assert "manifest.json" not in names(tmp_path / "out")
    document = json.loads(convert(model, tmp_path / "out", "--json", kernel=second).stdout)
    assert (document["layers_resumed"][0], document["layers_prepared"][-1]) == (0, 2)
    assert (document["device"], document["kernel"]) == ("cpu", second)
    assert contents(tmp_path / "out") == whole


def test_parts_of_different_kernels_make_one_folder(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    convert(model, tmp_path / "out", "--layers", "0,2", kernel="torch")
    convert(model, tmp_path / "out", "--layers", "1", kernel="numpy")
    run("seal", tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_small_chunks_give_the_same_bytes(
    model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_layer, "_CHUNK", 1000)  # no divisor of any tensor's size
    convert(model, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_the_progress_of_a_device_ends_at_the_total(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm70_convert.console import Console

    steps, totals = [], []

    @contextmanager
    def progress(_: Console, total: int, layers: int, __: str) -> Iterator[Any]:
        totals.append((total, layers))
        yield steps.append, lambda _: None

    monkeypatch.setattr(Console, "progress", progress)
    convert(model, tmp_path / "out")
    assert totals == [(sum(steps), 3)]


# A device whose copies come late


class Queue:
    """A stream. Copies given to it happen when somebody waits for them, and no sooner."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.done = 0

    def finish(self, count: int) -> None:
        while self.done < count:
            self.copies[self.done]()
            self.copies[self.done] = object  # so that it holds no tensor
            self.done += 1

    def wait_stream(self, other: Queue) -> None:
        other.finish(len(other.copies))


class Mark:
    """An event."""

    def __init__(self) -> None:
        self.at: tuple[Queue, int] | None = None

    def record(self, queue: Queue) -> None:
        self.at = queue, len(queue.copies)

    def synchronize(self) -> None:
        if self.at:
            self.at[0].finish(self.at[1])


class Later(TorchFunctionMode):
    """Puts off every copy that may be put off."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            self.queue.copies.append(lambda: args[0].copy_(args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


class LateDevice:
    """A device module such as torch.cuda, on which a forgotten wait gives wrong bytes."""

    Event = Mark

    def __init__(self) -> None:
        self.queues: list[Queue] = []
        self.current = Queue()
        self.devices: list[torch.device] = []
        self.released = 0
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def Stream(self) -> Queue:  # noqa: N802 - torch's name
        self.queues.append(Queue())
        return self.queues[-1]

    def stream(self, queue: Queue) -> Later:
        return Later(queue)

    def current_stream(self) -> Queue:
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.devices.append(device)

    def empty_cache(self) -> None:
        assert [t for t in self.alive if t() is not None] == []
        self.alive.clear()
        self.released += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    real = torch_sm70.prepare_layer

    def kernel(*projections: Any, outs: Any, **options: Any) -> None:
        tensors = [t for p in projections for t in p if t is not None] + [t for out in outs for t in out.values()]
        device.alive += [weakref.ref(t) for t in tensors]
        real(*projections, outs=outs, **options)

    use_kernel(monkeypatch, kernel)
    return device


@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_every_copy_is_waited_for(
    chunk: int, late: LateDevice, model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_layer, "_CHUNK", chunk)
    convert(model, tmp_path / "out")
    assert contents(tmp_path / "out") == whole
    assert late.devices == [torch.device("cpu")] * 3
    # Both ways went through the stream: 4 experts x 9 tensors there, and back in chunks.
    assert all(len(q.copies) >= 4 * 9 + 3 * 4 for q in late.queues)
    assert len(late.queues) == 3


def test_the_cache_is_released_once_a_layer_when_its_tensors_are_gone(
    late: LateDevice, model: Path, tmp_path: Path
) -> None:
    convert(model, tmp_path / "out", "--jobs", 3)
    assert late.released == 3
    assert late.alive == []


def test_the_cache_is_not_released_after_a_layer_that_failed(
    late: LateDevice, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, layers = torch_sm70.prepare_layer, []

    def kernel(*args: Any, **options: Any) -> None:
        layers.append(None)
        if len(layers) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        real(*args, **options)

    use_kernel(monkeypatch, kernel)
    convert(model, tmp_path / "out", "--layers", "0-1", code=7)
    assert (len(layers), late.released) == (2, 1)


def test_a_device_module_that_cannot_release_is_no_error(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    assert not hasattr(torch.get_device_module("cpu"), "empty_cache")
    convert(model, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_host_memory_is_pinned_for_a_gpu_and_never_more_than_two_of_each(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = device_layer.DeviceWorker("cuda:0", lambda **_: None)
    assert worker._pinned
    assert not device_layer.DeviceWorker("cpu", lambda **_: None)._pinned
    asked: list[int] = []
    real = device_layer.DeviceWorker._host
    monkeypatch.setattr(device_layer.DeviceWorker, "_host", lambda self, n: asked.append(n) or real(self, n))
    monkeypatch.setattr(device_layer, "_CHUNK", 5000)
    convert(model, tmp_path / "out")
    # Hidden 64, intermediate 128, group 32: qweight, qzeros and scales of gate, up and down, each twice; then two chunks.
    parts = [64 * 128 // 2, 2 * 128 // 2, 2 * 128 * 2] * 2 + [128 * 64 // 2, 4 * 64 // 2, 4 * 64 * 2]
    assert sorted(asked[: 2 * 9]) == sorted(parts * 2)
    assert asked[2 * 9 : 2 * 9 + 2] == [5000, 5000]
    assert len(asked) == 3 * (2 * 9 + 2)


# Failures


def fails(error: BaseException) -> Callable[..., None]:
    def kernel(*_: object, **__: object) -> None:
        raise error

    return kernel


FAILURES = {
    "memory": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        "cpu is out of memory: the layer takes 56832 bytes of sources and 122880 of banks",
    ),
    "cuda": (
        RuntimeError(
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously"
        ),
        "cpu failed: CUDA error: an illegal memory access was encountered",
    ),
    "compiler": (KeyError("sm_70"), "cpu failed: KeyError: 'sm_70'"),
    "silent": (NotImplementedError(), "cpu failed: NotImplementedError"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_device_that_fails_is_7_and_the_cpu_finishes_what_it_began(
    name: str, model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, message = FAILURES[name]
    out, real, calls = tmp_path / "out", torch_sm70.prepare_layer, []

    def kernel(*args: Any, **options: Any) -> None:
        calls.append(None)
        real(*args, **options)
        if len(calls) == 2:
            raise error

    use_kernel(monkeypatch, kernel)
    args = (model, "--out", out, "--tp-size", 1, "--tp-size", 2)
    (problem,) = problems(*args, "--kernel", "torch", code=7)
    assert problem == {"message": message, "layer": 1, "hint": HINT}
    assert {"journal.jsonl"} <= names(out)
    assert not names(out) & {"manifest.json", "layer-00001.safetensors", ".layer-00001.safetensors.sm70-tmp"}
    document = json.loads(run(*args, "--device", "cpu", "--json").stdout)
    assert 0 in document["layers_resumed"]
    assert 1 in document["layers_prepared"]
    assert contents(out) == whole


def test_a_device_that_fails_while_banks_come_back_leaves_no_file(
    late: LateDevice, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(mark: Mark) -> None:
        if mark.at and late.alive:  # not before the kernel ran
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Mark, "synchronize", synchronize)
    args = (model, "--out", tmp_path / "out", "--kernel", "torch", "--layers", 0)
    (problem,) = problems(*args, code=7)
    assert problem == {"message": "cpu failed: CUDA error: unspecified launch failure", "layer": 0, "hint": HINT}
    assert not any(name.endswith((".safetensors", ".sm70-tmp")) for name in names(tmp_path / "out"))
    assert late.released == 0


def test_a_scale_that_is_refused_is_3_as_on_the_cpu(tmp_path: Path) -> None:
    source = made.awq()
    name = f"{made.EXPERTS}.2.up_proj.scales"
    source.set_item(name, 5, made.f16([float("inf")]))
    model = source.write(tmp_path / "model")
    expected = problems(model, "--out", tmp_path / "cpu", "--kernel", "numpy", code=3)
    assert expected[0]["tensor"] == name
    assert problems(model, "--out", tmp_path / "gpu", "--kernel", "torch", code=3) == expected
    assert names(tmp_path / "gpu") == names(tmp_path / "cpu")


def test_findings_and_source_digests_are_those_of_the_cpu_path(tmp_path: Path) -> None:
    source = made.nvfp4()
    source.change(f"{made.EXPERTS}.1.up_proj.weight_scale_2", data=made.f32(0.0007))
    model = source.write(tmp_path / "model")
    documents = [
        json.loads(run(model, "--out", tmp_path / k, "--kernel", k, "--json").stdout) for k in ("numpy", "torch")
    ]
    assert documents[0]["findings"] == documents[1]["findings"] != []
    assert contents(tmp_path / "numpy") == contents(tmp_path / "torch")


def test_raw_scales_that_are_not_exact_are_4_and_name_the_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made.nvfp4().write(tmp_path / "model")
    error = RawScaleError("up", "because")
    error.expert = 3
    use_kernel(monkeypatch, fails(error))
    args = (model, "--out", tmp_path / "out", "--layout", "nvfp4-raw", "--kernel", "torch")
    (problem,) = problems(*args, code=4)
    assert problem["tensor"] == f"{made.EXPERTS}.3.up_proj.weight_scale"
    assert problem["message"] == "nvfp4-raw would not be exact: because"
    assert problem["layer"] == 0


@pytest.mark.parametrize("when", ["while reading", "while writing"])
def test_an_interrupt_stops_a_layer_midway(
    when: str, model: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is held until the main thread has heard, so it must be its own check that stops it."""
    from sm70_convert import layer_reader

    out, seen = tmp_path / "out", SimpleNamespace(reads=0, writes=0)
    read, write = layer_reader.LayerReader.read, device_layer._write
    stopped: list[Any] = []
    real_call = device_layer.DeviceWorker.__call__

    def call(self: Any, plan: Any, folder: Any, layer: Any, stop: Any, *rest: Any) -> Any:
        stopped.append(stop)
        return real_call(self, plan, folder, layer, stop, *rest)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped[0].wait(30)

    def reading(self: Any, expert: int) -> Any:
        seen.reads += 1
        if when == "while reading" and seen.reads == 2:
            interrupt()
        return read(self, expert)

    def writing(*args: Any) -> None:
        seen.writes += 1
        if when == "while writing" and seen.writes == 2:
            interrupt()
        write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(device_layer.DeviceWorker, "__call__", call)
        patch.setattr(layer_reader.LayerReader, "read", reading)
        patch.setattr(device_layer, "_write", writing)
        convert(model, out, code=130)
    assert (seen.reads, seen.writes) == ((2, 0) if when == "while reading" else (4, 2))
    assert not any(name.startswith(("layer-", ".layer-")) for name in names(out))
    convert(model, out)
    assert contents(out) == whole


def test_the_sealed_folder_verifies_against_its_source(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out")
    run("verify", tmp_path / "out", "--source", model)


def test_a_tp_size_is_added_on_a_device(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    run(model, "--out", tmp_path / "out", "--tp-size", 1, "--kernel", "numpy")
    run(model, "--out", tmp_path / "out", "--tp-size", 2, "--kernel", "torch")
    assert contents(tmp_path / "out") == whole
