"""One layer at a time on a device: experts are copied there while the next are read, and banks back while others are written.

The device holds one layer's sources and banks; the host holds two experts, and then two chunks of a bank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sm70_convert import names
from sm70_convert.bank import BankWriter
from sm70_convert.convert import FinishedLayer, Stopped, bank_writers
from sm70_convert.errors import DeviceError, Problem, first_line
from sm70_convert.expert_tensors import LayerPlan
from sm70_convert.journal import OpenFolder
from sm70_convert.layer_reader import LayerReader
from sm70_convert.layout import bank_tensors
from sm70_convert.plan import Plan
from sm70_convert.seal import Progress
from sm70_kernels.spec import LayerProjection, RawScaleError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Banks = Mapping[int, Mapping[str, torch.Tensor]]

LayerKernel = Callable[..., None]  # prepare_layer of sm70_kernels.torch_sm70, native or triton_sm70

_CHUNK = 32 << 20
_HINT = "run again with --device cpu and without --kernel: it resumes, and the banks are the same, bit for bit"
# torch has signed words only; the bits are the same.
_WORDS: dict[Any, Any] = {np.uint32: np.int32, np.uint16: np.float16, np.uint8: np.uint8}


class DeviceWorker:
    """Prepares layers on one device (`cuda:0`) with one kernel. On the device `cpu` it does the same without pinned memory."""

    def __init__(self, device: str, kernel: LayerKernel) -> None:
        import torch

        self._device = torch.device(device)
        self._module: Any = torch.get_device_module(self._device)
        self._pinned = self._device.type != "cpu"
        self._kernel = kernel

    def __call__(
        self,
        plan: Plan,
        folder: OpenFolder,
        layer: LayerPlan,
        stop: threading.Event,
        allow_nonfinite: bool,
        progress: Progress,
    ) -> FinishedLayer:
        """Prepares one layer for every rank of every TP size. Raises DeviceError where the device fails."""
        import torch

        try:
            self._module.set_device(self._device)  # of this thread
            reader = LayerReader(
                plan, layer, allow_nonfinite=allow_nonfinite, depth=2, new_buffer=lambda n: self._host(n).numpy()
            )
            with bank_writers(plan, folder, layer) as writers:
                self._prepare(plan, folder, layer, reader, writers, stop, progress)
                # The layer's tensors went with that call: their memory goes back before the next layer takes its own.
                if release := getattr(self._module, "empty_cache", None):
                    release()
                reader.experts.forget()
        except torch.OutOfMemoryError as exc:
            banks = sum(tp_size * plan.bank_bytes(tp_size) for tp_size in folder.todo)
            sizes = f"{layer.source_bytes} bytes of sources and {banks} of banks"
            what = f"{self._device} is out of memory: the layer takes {sizes}"
            raise DeviceError(Problem(what, layer=layer.layer, hint=_HINT)) from exc
        except RuntimeError as exc:
            raise DeviceError(
                Problem(f"{self._device} failed: {first_line(exc)}", layer=layer.layer, hint=_HINT)
            ) from exc
        return FinishedLayer(layer.layer, list(writers.values()), reader.records(), reader.findings())

    def _host(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _prepare(
        self,
        plan: Plan,
        folder: OpenFolder,
        layer: LayerPlan,
        reader: LayerReader,
        writers: Mapping[tuple[int, int], BankWriter],
        stop: threading.Event,
        progress: Progress,
    ) -> None:
        """Reads, prepares and writes a layer. Every tensor on the device is gone when it returns."""
        import torch

        copies = self._module.Stream()
        copies.wait_stream(self._module.current_stream())
        sources = self._upload(plan, layer, reader, copies, stop, progress)
        self._module.current_stream().wait_stream(copies)
        dtypes = {"I32": torch.int32, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
        banks = {
            tp_size: {
                t.name: torch.empty((tp_size, plan.moe.experts, *t.shape), dtype=dtypes[t.dtype], device=self._device)
                for t in bank_tensors(plan.layout, plan.moe, tp_size)
            }
            for tp_size in folder.todo
        }
        try:
            self._kernel(
                *(sources[p] for p in names.PROJECTIONS),
                layout=plan.layout.name,
                interleave=plan.layout.interleave_gate_up,
                outs=list(banks.values()),
            )
        except RawScaleError as exc:
            raise reader.experts.raw_layout_failed(exc.expert or 0, exc.projection, exc.reason) from exc
        except RuntimeError:
            raise
        except Exception as exc:  # a compiler's errors are of many types
            raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
        copies.wait_stream(self._module.current_stream())
        self._download(banks, writers, copies, stop)

    def _upload(
        self, plan: Plan, layer: LayerPlan, reader: LayerReader, copies: Any, stop: threading.Event, progress: Progress
    ) -> dict[str, LayerProjection]:
        """All experts of a layer on the device; the copies are queued on the stream `copies`."""
        import torch

        targets: dict[tuple[str, str], torch.Tensor] = {}
        factors: dict[str, NDArray[np.float32]] = {}
        copied = [self._module.Event(), self._module.Event()]
        for expert in range(plan.moe.experts):
            if stop.is_set():
                raise Stopped
            copied[expert % 2].synchronize()  # what was read two experts ago has left its buffers
            for projection, p in reader.read(expert).items():
                for part in ("weight", "scales", "zeros"):
                    if (array := getattr(p, part)) is None:
                        continue
                    host = torch.from_numpy(array.view(_WORDS[array.dtype.type]))
                    if expert == 0:
                        shape = (plan.moe.experts, *host.shape)
                        targets[projection, part] = torch.empty(shape, dtype=host.dtype, device=self._device)
                    with self._module.stream(copies):
                        targets[projection, part][expert].copy_(host, non_blocking=True)
                if p.global_scale is not None:
                    factors.setdefault(projection, np.empty(plan.moe.experts, np.float32))[expert] = p.global_scale
            copied[expert % 2].record(copies)
            progress(sum(s.nbytes for s in layer.sources))
        return {
            projection: LayerProjection(
                targets[projection, "weight"],
                targets[projection, "scales"],
                targets.get((projection, "zeros")),
                torch.from_numpy(factors[projection]).to(self._device) if projection in factors else None,
            )
            for projection in names.PROJECTIONS
        }

    def _download(
        self, banks: Banks, writers: Mapping[tuple[int, int], BankWriter], copies: Any, stop: threading.Event
    ) -> None:
        """Writes the banks chunk by chunk: one is copied while the one before it is digested and written."""
        import torch

        def chunks() -> Iterator[tuple[BankWriter, str, torch.Tensor]]:
            for (tp_size, rank), writer in writers.items():
                for name, tensor in banks[tp_size].items():
                    data = tensor[rank].reshape(-1).view(torch.uint8)
                    for start in range(0, len(data), _CHUNK):
                        yield writer, name, data[start : start + _CHUNK]

        largest = max(tensor[0].nbytes for bank in banks.values() for tensor in bank.values())
        buffers = [self._host(min(_CHUNK, largest)) for _ in range(2)]
        waiting: tuple[BankWriter, str, torch.Tensor, Any] | None = None
        for number, (writer, name, chunk) in enumerate(chunks()):
            if stop.is_set():
                raise Stopped
            host = buffers[number % 2][: chunk.numel()]
            with self._module.stream(copies):
                host.copy_(chunk, non_blocking=True)
            copied = self._module.Event()
            copied.record(copies)
            if waiting:
                _write(*waiting)
            waiting = (writer, name, host, copied)
        if waiting:
            _write(*waiting)


def _write(writer: BankWriter, name: str, host: torch.Tensor, copied: Any) -> None:
    copied.synchronize()
    writer.append(name, host.numpy())
