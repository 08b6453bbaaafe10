"""Both kernels against every recording of the runtimes' own conversion, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from expert_banks import KERNELS, prepare, raw
from sm70_kernels import reference, scale_tables
from sm70_kernels.spec import Projection

if TYPE_CHECKING:
    from numpy.typing import NDArray

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.iterdir())
RECORDINGS = [path for path in FILES if not path.name.endswith(".hf.safetensors")]
ONE = 0x38  # the e4m3 code of 1.0
E4M3_NAN = 0x7F
FP16_NAN = 0x7FFF


class Recording(NamedTuple):
    tensors: dict[str, NDArray[Any]]  # raw bits
    metadata: dict[str, str]

    @property
    def outputs(self) -> list[str]:
        """The names of what the runtime's code gave, as against what was put in."""
        known = ("tm_weight", "tm_scales", "scale_f16")
        return [name for name in self.tensors if name in known or name.startswith("rank")]


def load(path: Path) -> Recording:
    with safe_open(path, "pt") as file:
        return Recording({name: raw(file.get_tensor(name)) for name in file.keys()}, file.metadata())  # noqa: SIM118


def assert_equal(actual: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    differences = int((actual != expected).sum())
    assert differences == 0, f"{what}: {differences} of {expected.size} differ"


def compare_file(path: Path, kernel: str) -> tuple[int, set[Path]]:
    """Compare all that a recording holds; gives the number of tensors compared and the files read."""
    recording = load(path)
    kind = recording.metadata["kind"]
    if kind == "nvfp4_scale_table":
        return compare_scale_table(recording, kernel), {path}
    if kind in ("awq", "nvfp4"):
        compare = compare_awq if kind == "awq" else compare_nvfp4
        return compare(recording, kernel), {path}
    source = GOLDEN / f"{path.name.split('.')[0]}.hf.safetensors"
    return compare_moe(recording, load(source), kernel), {path, source}


def compare_scale_table(recording: Recording, kernel: str) -> int:
    codes, globals_ = recording.tensors["codes_e4m3"], recording.tensors["globals_f32"]
    for global_scale, expected in zip(globals_, recording.tensors["scale_f16"], strict=True):
        if kernel == "numpy":
            table = scale_tables.nvfp4_scale_table(global_scale)[codes]
        elif kernel != "reference":
            # The codes, one a group, in the first column of a down.
            down = blank(16 * len(codes), 32, 16, global_scale)
            down.scales[0] = codes
            other = blank(32, 16 * len(codes), 16, global_scale)
            (banks,) = prepare(kernel, other, other, down, layout="nvfp4-fp16", interleave=False, tp_sizes=[1])
            table = banks["w2_tm_scales"][0, :, 0]
        else:
            products = reference.scale_products(torch.from_numpy(codes), torch.tensor(global_scale))
            table = raw(products)
        assert_equal(table, expected, f"e4m3 codes times {global_scale}")
    return 1


def blank(k: int, n: int, group_size: int, global_scale: np.float32 | None) -> Projection:
    """A projection of zeros: AWQ, or NVFP4 if there is a global scale."""
    if global_scale is not None:
        weight, scales = np.zeros((n, k // 2), np.uint8), np.zeros((n, k // 16), np.uint8)
        return Projection(weight, scales, None, global_scale)
    weight, zeros = (np.zeros((rows, n // 8), np.uint32) for rows in (k, k // group_size))
    return Projection(weight, np.zeros((k // group_size, n), np.uint16), zeros, None)


def prepare_single(
    matrix: Projection, recording: Recording, layout: str, kernel: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The words and scales that the kernel makes of a single matrix.

    It becomes the down of an expert or, if it is interleaved, gate|up. There zeros fill K and N up to the
    next size that an expert can have: they come last in a tile or after all tiles, and are cut off again.
    """
    k, n, group_size = (int(recording.metadata[name]) for name in ("k", "n", "group_size"))
    fp4 = matrix.global_scale is not None
    if recording.metadata["interleave"] == "0":
        other = blank(n, k, group_size, matrix.global_scale)
        (banks,) = prepare(kernel, other, other, matrix, layout=layout, interleave=False, tp_sizes=[1])
        return banks["w2_tm_weight"][0], banks["w2_tm_scales"][0]

    hidden, intermediate = (-(-size // step) * step for size, step in ((k, 32), (n // 2, group_size)))
    halves = [blank(hidden, intermediate, group_size, matrix.global_scale) for _ in ("gate", "up")]
    for part, *targets in zip(matrix, *halves, strict=True):
        if isinstance(part, np.ndarray):
            for source, target in zip(np.split(part, 2, axis=0 if fp4 else 1), targets, strict=True):
                target[: source.shape[0], : source.shape[1]] = source
    down = blank(intermediate, hidden, group_size, matrix.global_scale)
    (banks,) = prepare(kernel, *halves, down, layout=layout, interleave=True, tp_sizes=[1])
    tiles = banks["w13_tm_weight"].reshape(-1, hidden // 8, 32)  # 32 columns, 8 rows, column
    return (
        tiles[: n // 32, : k // 8].reshape(k, n // 8),
        banks["w13_tm_scales"][0, : k // group_size, :n],
    )


def assert_meta(recording: Recording, layout: str, prefix: str, k: int, n: int) -> None:
    recorded = tuple(int(recording.metadata[f"{prefix}{name}"]) for name in ("k_ld", "q_ld"))
    assert reference.meta(layout, k, n) == recorded


def compare_awq(recording: Recording, kernel: str) -> int:
    tensors = recording.tensors
    matrix = Projection(tensors["qweight"], tensors["scales"], tensors["qzeros"], None)
    words, scales = prepare_single(matrix, recording, "awq-half2", kernel)
    assert_equal(words, tensors["tm_weight"], "tm_weight")
    assert_equal(scales, tensors["tm_scales"], "tm_scales")
    assert_meta(recording, "awq-half2", "", int(recording.metadata["k"]), int(recording.metadata["n"]))
    return 2


def compare_nvfp4(recording: Recording, kernel: str) -> int:
    """These recordings start from fp16 scales, which no one pair of codes and global gives.

    So each distinct scale takes a turn as the global: code 1.0 where it belongs and NaN elsewhere must put
    its bits exactly there. A recorded NaN's payload comes from no product: its turn marks its places.
    """
    tensors = recording.tensors
    rebuilt = np.zeros_like(tensors["tm_scales"])
    placed = np.zeros(rebuilt.shape, int)
    for scale in np.unique(tensors["scales"]):
        value = scale.view(np.float16)
        here, elsewhere, factor = (E4M3_NAN, ONE, 1) if np.isnan(value) else (ONE, E4M3_NAN, value)
        codes = np.where(tensors["scales"] == scale, here, elsewhere).astype(np.uint8)
        matrix = Projection(tensors["weight_packed"], codes.T.copy(), None, np.float32(factor))
        words, scales = prepare_single(matrix, recording, "nvfp4-fp16", kernel)
        assert_equal(words, tensors["tm_weight"], "tm_weight")
        places = (scales == FP16_NAN) == np.isnan(value)
        rebuilt[places] = scale if np.isnan(value) else scales[places]
        placed += places
    assert (placed == 1).all()
    assert_equal(rebuilt, tensors["tm_scales"], "tm_scales")
    assert_meta(recording, "nvfp4-fp16", "", int(recording.metadata["k"]), int(recording.metadata["n"]))
    return 2


def source_expert(source: Recording, expert: int, *, awq: bool) -> list[Projection]:
    def projection(name: str) -> Projection:
        tensor = {
            part: source.tensors.get(f"experts.{expert}.{name}_proj.{part}")
            for part in ("qweight", "qzeros", "scales", "weight", "weight_scale", "weight_scale_2")
        }
        if awq:
            return Projection(tensor["qweight"], tensor["scales"], tensor["qzeros"], None)
        return Projection(tensor["weight"], tensor["weight_scale"], None, np.float32(tensor["weight_scale_2"]))

    return [projection(name) for name in ("gate", "up", "down")]


def compare_moe(recording: Recording, source: Recording, kernel: str) -> int:
    metadata = recording.metadata
    layout = "awq-half2" if metadata["kind"].startswith("awq") else "nvfp4-fp16"
    tp_size, experts, hidden, intermediate = (
        int(metadata[name]) for name in ("tp", "experts", "hidden", "intermediate")
    )
    stacks: dict[str, list[NDArray[Any]]] = {}
    for expert in range(experts):
        (banks,) = prepare(
            kernel,
            *source_expert(source, expert, awq=layout == "awq-half2"),
            layout=layout,
            interleave=metadata["interleave"] == "1",
            tp_sizes=[tp_size],
        )
        for name, array in banks.items():
            for rank in range(tp_size):
                stacks.setdefault(f"rank{rank}.{name}", []).append(array[rank])
    assert set(stacks) == set(recording.outputs)
    for name, arrays in stacks.items():
        assert_equal(np.stack(arrays), recording.tensors[name], name)
    assert_meta(recording, layout, "w13_", hidden, 2 * intermediate // tp_size)
    assert_meta(recording, layout, "w2_", intermediate // tp_size, hidden)
    return len(stacks)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".safetensors"))
def test_recording(path: Path, kernel: str) -> None:
    compared, _ = compare_file(path, kernel)
    assert compared == len(load(path).outputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_recording_is_compared(kernel: str) -> None:
    compared = 0
    read: set[Path] = set()
    for path in RECORDINGS:
        tensors, files = compare_file(path, kernel)
        compared += tensors
        read |= files
    assert read == set(FILES)
    assert compared == sum(len(load(path).outputs) for path in FILES)
    # What was there when this was written: a recording that vanishes must not go unnoticed.
    assert len(read) >= 36
    assert compared >= 207
