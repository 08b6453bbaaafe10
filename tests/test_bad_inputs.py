"""Odd and bad checkpoints and output folders: what each gets, and that a refusal leaves nothing that looks finished."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from blake3 import blake3
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from made import (
    EXPERTS,
    INDEX,
    LEFT_OUT,
    PROJECTIONS,
    SINGLE,
    Made,
    Tensor,
    awq,
    bf16,
    edited,
    expert_tensors,
    f16,
    f32,
    fuse,
    nvfp4,
    tensor,
    write_file,
)
from sm70_convert.cli import main

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FORMATS: dict[str, Callable[..., Made]] = {"awq": awq, "nvfp4": nvfp4}
MARKER = {"awq": "qweight", "nvfp4": "weight_scale"}  # the part that tells a quantised projection
SCALES = {"awq": "scales", "nvfp4": "weight_scale"}
BANK = "sm70/tp1/rank0/layer-00000.safetensors"
FUSED = {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2"}
NAN, INF = f16(np.nan), f16(np.inf)
AWQ_ONLY = "only 4-bit AWQ, version gemm, with zero points, can be prepared"
KEEP = "export the checkpoint again, or keep such values as the runtime would with --allow-nonfinite"

Edit = Callable[[Made], object]
After = Callable[[Path], object]


def run(source: Path, out: Path, *args: object) -> Result:
    """Converts in this process, one layer after the other."""
    return CliRunner().invoke(main, [str(a) for a in (source, "--out", out, "--jobs", 1, *args)])


def seal(source: Path, out: Path, *args: object) -> Any:
    """Converts, which must go well; gives the --json document."""
    result = run(source, out, *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lines(result: Result, *kinds: str) -> list[str]:
    """The lines on stderr that are not warnings."""
    assert "Traceback" not in result.stderr
    return [line for line in result.stderr.splitlines() if line.startswith(kinds or ("error: ", "... and "))]


def assert_nothing_sealed(out: Path) -> None:
    assert not (out / "sm70" / "manifest.json").exists()
    assert not (out / "config.json").exists()
    assert temporary_files(out) == []


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob(".*.sm70-tmp"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder; a large one (sparse, here) by its start."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = file.read(1 << 20)
    return found


class Case(NamedTuple):
    make: Callable[[], Made]
    edit: Edit
    code: int
    errors: tuple[str, ...]
    after: After
    args: tuple[object, ...]
    hint: str | None
    planned: bool  # refused before any byte is written

    def write(self, folder: Path) -> Path:
        made = self.make()
        self.edit(made)
        made.write(folder)
        self.after(folder)
        return folder


REFUSED: list[Any] = []


def refused(
    name: str,
    make: Callable[[], Made],
    edit: Edit,
    code: int,
    *errors: str,
    after: After = lambda _: None,
    args: tuple[object, ...] = (),
    hint: str | None = None,
    planned: bool = True,
) -> None:
    REFUSED.append(pytest.param(Case(make, edit, code, errors, after, args, hint, planned), id=name))


def nothing(_: Made) -> None:
    """The checkpoint is right; something else is not."""


# 1. The intermediate channels of a rank are not a multiple of the group size.
WIDE = partial(awq, experts=1, hidden=128, intermediate=768, group_size=128)
for _name, _make, _sizes, _impossible, _works in (
    ("awq-g32-tp4", awq, (4,), {4: (16, 64, 32)}, "1, 2"),
    ("awq-g128-i768-tp4-tp8", WIDE, (1, 4, 8), {4: (192, 768, 128), 8: (96, 768, 128)}, "1, 2"),
    ("nvfp4-tp8", nvfp4, (8,), {8: (8, 64, 16)}, "1, 2, 4"),
):
    refused(
        f"1-{_name}",
        _make,
        nothing,
        4,
        *(
            f"{EXPERTS}.0.gate_proj.{'weight' if _make is nvfp4 else 'qweight'}: TP size {_tp} is not possible: "
            f"each rank would hold {_local} of the {_all} intermediate channels, not a multiple of the group size {_group}"
            for _tp, (_local, _all, _group) in _impossible.items()
        ),
        args=tuple(a for size in _sizes for a in ("--tp-size", size)),
        hint=f"TP sizes that work for this checkpoint: {_works}",
    )
for _make, _part, _works in ((awq, "qweight", "1, 2"), (nvfp4, "weight", "1, 2, 4")):
    refused(f"1-{_make.__name__}-tp3", _make, nothing, 4,
            f"{EXPERTS}.0.gate_proj.{_part}: TP size 3 is not possible: "
            "the expert intermediate size 64 does not divide by 3",
            args=("--tp-size", 3), hint=f"TP sizes that work for this checkpoint: {_works}")  # fmt: skip


# 2. Files that are missing, cut, or something else.
def cut(file: str, size: int) -> After:
    """Shortens a file: to `size` bytes, or by -size."""
    return lambda folder: os.truncate(folder / file, size if size >= 0 else (folder / file).stat().st_size + size)


def whole_size(made: Made, file: str) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in made.shards[file].items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return 8 + -(-len(json.dumps(header)) // 8) * 8 + end


def lfs_pointer(folder: Path) -> None:
    oid = "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    (folder / SECOND).write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 12345\n")


def sparse_header(folder: Path) -> None:
    """A file whose header would take a byte more than 100 MB, all of it a hole."""
    with (folder / SECOND).open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(100_000_200)


def dangling(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("blobs/gone")


def no_shards(folder: Path) -> None:
    for path in (FIRST, SECOND, INDEX):
        (folder / path).unlink()


def index_gives(name: str, file: object) -> After:
    def after(folder: Path) -> None:
        with edited(folder / INDEX) as document:
            document["weight_map"][name] = file

    return after


FETCH, AGAIN = "fetch the missing file, then run again", "fetch the file again"
for _format, _one in FORMATS.items():
    _make = partial(_one, shards=2)
    _size = whole_size(_make(), SECOND)
    refused(f"2-{_format}-missing-shard", _make, nothing, 3, f"{SECOND}: is missing",
            after=lambda folder: (folder / SECOND).unlink(), hint=FETCH)  # fmt: skip
    refused(f"2-{_format}-dangling-symlink", _make, nothing, 3, f"{SECOND}: is missing", after=dangling, hint=FETCH)
    refused(f"2-{_format}-truncated-data", _make, nothing, 3,
            f"{SECOND}: is truncated: expected {_size} bytes, found {_size - 1}", after=cut(SECOND, -1), hint=AGAIN)  # fmt: skip
    refused(f"2-{_format}-empty-shard-file", _make, nothing, 3,
            f"{SECOND}: is too short for a safetensors file: expected at least 8 bytes, found 0",
            after=cut(SECOND, 0))  # fmt: skip
    refused(f"2-{_format}-git-lfs-pointer", _make, nothing, 3, f"{SECOND}: is a git-lfs pointer, not the file itself",
            after=lfs_pointer, hint="fetch the real file (git lfs pull), then run again")  # fmt: skip
    refused(f"2-{_format}-header-over-100-MB", _make, nothing, 3,
            f"{SECOND}: header is over the limit: expected at most 100000000 bytes, found 100000001",
            after=sparse_header)  # fmt: skip
    refused(f"2-{_format}-shard-without-the-name", _make, nothing, 3,
            f"{EXPERTS}.9.gate_proj.{MARKER[_format]} ({FIRST}): the index gives it to a shard that does not hold it",
            after=index_gives(f"{EXPERTS}.9.gate_proj.{MARKER[_format]}", FIRST))  # fmt: skip
refused("2-two-bad-shards-at-once", partial(awq, shards=2), nothing, 3,
        f"{FIRST}: is missing", f"{SECOND}: is a git-lfs pointer, not the file itself",
        after=lambda folder: (lfs_pointer(folder), (folder / FIRST).unlink()))  # fmt: skip
refused("2-truncated-header", partial(awq, shards=2), lambda m: m.shards.update({SECOND: {}}), 3,
        f"{SECOND}: is truncated inside its header: expected 16 bytes or more, found 15",
        after=lambda folder: (index_gives("x", SECOND)(folder), cut(SECOND, 15)(folder)))  # fmt: skip
refused("2-no-shard-at-all", partial(awq, shards=2), nothing, 3, "{source}: no .safetensors file in it",
        after=no_shards)  # fmt: skip


# 3. Names that lie twice, and an index that leads elsewhere.
def twice(made: Made) -> None:
    made.index = False
    made.add("model.norm.weight", tensor("BF16", (64,)), FIRST)


refused("3-one-name-in-two-shards", partial(awq, shards=2), twice, 3,
        f"model.norm.weight ({SECOND}): also lies in {FIRST}, and there is no index to say which one counts",
        hint=f"add {INDEX}, or remove the file that does not belong")  # fmt: skip
for _name, _file in (
    ("parent", "../other.safetensors"),
    ("absolute", "/etc/other.safetensors"),
    ("subfolder", "sub/other.safetensors"),
    ("backslash", "..\\other.safetensors"),
    ("nul", "other\0.safetensors"),
    ("hidden", ".other.safetensors"),
    ("other-suffix", "other.bin"),
    ("null", None),
    ("list", [FIRST]),
):
    refused(f"3-index-names-{_name}", partial(awq, shards=2), nothing, 3,
            f"model.norm.weight ({INDEX}): the index names a shard that is not a plain file name in this folder: "
            f"expected NAME.safetensors, found {_file!r}", after=index_gives("model.norm.weight", _file))  # fmt: skip


# 4. Experts unlike the others, missing, or too many.
def unquantise(*projections: str) -> Edit:
    return lambda m: [m.unquantise(f"{EXPERTS}.1.{projection}_proj") for projection in projections]


def plain_weights(*projections: str) -> list[str]:
    what = "is not quantised (BF16), but other experts of its layer are"
    return [f"{EXPERTS}.1.{projection}_proj.weight ({SINGLE}): {what}" for projection in projections]


for _format, _make in FORMATS.items():
    _marker = MARKER[_format]
    refused(f"4-{_format}-bf16-expert", _make, unquantise(*PROJECTIONS), 4, *plain_weights(*PROJECTIONS),
            hint="quantise all experts of a layer, or none and list the layer in the exclude list")  # fmt: skip
    refused(f"4-{_format}-bf16-gate-of-an-expert", _make, unquantise("gate"), 4, *plain_weights("gate"))
    refused(f"4-{_format}-missing-expert", _make, lambda m: m.drop_expert(1), 3,
            f"{EXPERTS}.1.gate_proj.{_marker}: expert 1 of 4 has no tensors")  # fmt: skip
    refused(f"4-{_format}-last-expert-missing", _make, lambda m: m.drop_expert(3), 3,
            f"{EXPERTS}.3.gate_proj.{_marker}: expert 3 of 4 has no tensors")  # fmt: skip
    refused(f"4-{_format}-index-beyond", _make,
            lambda m, marker=_marker: m.add(f"{EXPERTS}.4.up_proj.{marker}",
                                            m.tensors[f"{EXPERTS}.3.up_proj.{marker}"]), 3,
            f"{EXPERTS}.4.up_proj.{_marker} ({SINGLE}): expert number is beyond the 4 of config.json")  # fmt: skip
    refused(f"4-{_format}-one-tensor-missing", _make,
            lambda m, part=SCALES[_format]: m.drop(f"{EXPERTS}.2.down_proj.{part}"), 3,
            f"{EXPERTS}.2.down_proj.{SCALES[_format]}: is missing")  # fmt: skip
    refused(f"4-{_format}-layer-without-experts", partial(_make, layers=2),
            lambda m: [m.drop_expert(e, 1) for e in range(4)], 3,
            f"model.layers.1.mlp.gate.weight ({SINGLE}): layer 1 has a router but none of its 4 experts")  # fmt: skip
    refused(f"4-{_format}-layer-without-tensors", partial(_make, shards=2),
            lambda m: m.config.update(num_hidden_layers=3), 3,
            f"{INDEX}: no tensor at all of decoder layers 1-2")  # fmt: skip


# 5. One global scale for all experts.
def one_global(made: Made) -> None:
    made.drop(*(name for name in made.tensors if name.endswith(".weight_scale_2")))
    made.add(f"{EXPERTS}.weight_scale_2", tensor("F32", (), f32(1e-3)))


def fused_globals(shape: tuple[int, ...]) -> Edit:
    def edit(made: Made) -> None:
        fuse(made, FUSED)
        for name in ("gate_up_proj", "down_proj"):
            made.change(f"{EXPERTS}.{name}_weight_scale_2", shape=shape)

    return edit


refused("5-one-global-for-all", nvfp4, one_global, 4,
        f"{EXPERTS}.weight_scale_2 ({SINGLE}): is one global scale for all experts",
        hint="use an export with scales for each expert")  # fmt: skip
for _shape in ((), (1,)):
    refused(f"5-fused-one-global-{len(_shape)}-d", nvfp4, fused_globals(_shape), 4,
            *(f"{EXPERTS}.{p}_weight_scale_2 ({SINGLE}): is one global scale for all experts: "
              f"expected shape [4], found {list(_shape)}" for p in ("gate_up_proj", "down_proj")))  # fmt: skip


# 6. Scales that are no numbers in fp16. Column 5 of a word of eight lies in its nibble 6.
def awq_scale(item: bytes, position: int = 64 + 5) -> Edit:
    return lambda m: m.set_item(f"{EXPERTS}.2.up_proj.scales", position, item)


def awq_product(scale: float, zero: int) -> Edit:
    """The same scale everywhere; all zero points 0 but that of columns 8 c + 5."""

    def edit(made: Made) -> None:
        made.change(f"{EXPERTS}.2.up_proj.scales", data=f16(scale))
        made.change(f"{EXPERTS}.2.up_proj.qzeros", data=np.uint32(zero << 24).tobytes())

    return edit


def awq_bf16(made: Made) -> None:
    for expert in range(4):
        made.change(f"{EXPERTS}.{expert}.up_proj.scales", dtype="BF16", data=bf16(0.01))
    made.set_item(f"{EXPERTS}.2.up_proj.scales", 5, bf16(3e38))


def nvfp4_code(code: int, global_scale: float = 1e-3) -> Edit:
    """One code among small ones, in row 3, group 1 of down."""

    def edit(made: Made) -> None:
        made.change(f"{EXPERTS}.2.down_proj.weight_scale", data=b"\x38")
        made.set_item(f"{EXPERTS}.2.down_proj.weight_scale", 3 * 4 + 1, bytes([code]))
        made.change(f"{EXPERTS}.2.down_proj.weight_scale_2", data=f32(global_scale))

    return edit


NONFINITE: tuple[tuple[str, Callable[..., Made], Edit, str, str], ...] = (
    ("awq-nan-scale", awq, awq_scale(NAN), "up_proj.scales",
     "scale nan is not finite in fp16 at group 1, column 5 (1 in all)"),
    ("awq-inf-scale", awq, awq_scale(INF), "up_proj.scales",
     "scale inf is not finite in fp16 at group 1, column 5 (1 in all)"),
    ("awq-bf16-scale-beyond-fp16", awq, awq_bf16, "up_proj.scales",
     "scale inf is not finite in fp16 at group 0, column 5 (1 in all)"),
    # 4368 * 15 is halfway from the largest fp16 to the next power of two, and rounds up.
    ("awq-product-overflows", awq, awq_product(4368, 15), "up_proj.scales",
     "scale 4368 times zero point 15 overflows fp16 at group 0, column 5 (16 in all)"),
    ("awq-negative-product-overflows", awq, awq_product(-60000, 2), "up_proj.scales",
     "scale -60000 times zero point 2 overflows fp16 at group 0, column 5 (16 in all)"),
    ("nvfp4-nan-code", nvfp4, nvfp4_code(0x7F), "down_proj.weight_scale",
     "block scale code 0x7f is NaN at row 3, group 1 (1 in all)"),
    ("nvfp4-negative-nan-code", nvfp4, nvfp4_code(0xFF), "down_proj.weight_scale",
     "block scale code 0xff is NaN at row 3, group 1 (1 in all)"),
    # 448 * 146.25 is 65520, which rounds to infinity.
    ("nvfp4-product-overflows", nvfp4, nvfp4_code(0x7E, 146.25), "down_proj.weight_scale",
     "block scale code 0x7e times global scale 146.25 overflows fp16 at row 3, group 1 (1 in all)"),
    ("nvfp4-inf-global", nvfp4, nvfp4_code(0x38, np.inf), "down_proj.weight_scale",
     "global scale is inf at row 0, group 0 (256 in all)"),
    ("nvfp4-nan-global", nvfp4, nvfp4_code(0x38, np.nan), "down_proj.weight_scale",
     "global scale is nan at row 0, group 0 (256 in all)"),
)  # fmt: skip
for _name, _make, _edit, _part, _message in NONFINITE:
    refused(f"6-{_name}", _make, _edit, 3, f"{EXPERTS}.2.{_part} ({SINGLE}): {_message}", hint=KEEP, planned=False)


# 7. A config that the tensors do not bear out, and AWQ of another kind.
def quantization(**fields: object) -> Edit:
    return lambda m: m.quantization.update(fields)


def other_group(config_says: int) -> list[str]:
    real = {128: 64, 64: 128}[config_says]
    errors = []
    for projection in PROJECTIONS:
        name, want, have = f"{EXPERTS}.0.{projection}_proj", 128 // config_says, 128 // real
        errors.append(f"{name}.qzeros ({SINGLE}): has the wrong shape for this model: "
                      f"expected [{want}, 16], found [{have}, 16]")  # fmt: skip
        errors.append(f"{name}.scales ({SINGLE}): its shape says group size {real}, config.json says {config_says}: "
                      f"expected [{want}, 128], found [{have}, 128]")  # fmt: skip
    return errors


def all_plain(made: Made) -> None:
    for expert in range(4):
        for projection in PROJECTIONS:
            made.unquantise(f"{EXPERTS}.{expert}.{projection}_proj")


def without(part: str) -> Edit:
    return lambda m: m.drop(*(name for name in m.tensors if name.endswith(f".{part}")))


for _says in (128, 64):
    refused(f"7-awq-config-says-g{_says}",
            partial(awq, experts=1, hidden=128, intermediate=128, group_size=192 - _says), quantization(group_size=_says),
            3, *other_group(_says))  # fmt: skip
refused("7-nvfp4-config-says-g32", nvfp4,
        lambda m: m.quantization["config_groups"]["group_0"]["weights"].update(group_size=32), 3,
        "config.json: NVFP4 has one scale for 16 values: expected group_size 16, found 32")  # fmt: skip
for _format, _make in FORMATS.items():
    refused(f"7-{_format}-config-but-bf16-weights", _make, all_plain, 3,
            f"{EXPERTS}.0.gate_proj.weight ({SINGLE}): is not quantised (BF16), "
            f"but quantization_config says {_format} and does not exclude its layer")  # fmt: skip
for _format, _part in (("awq", "qzeros"), ("awq", "scales"), ("nvfp4", "weight_scale"), ("nvfp4", "weight_scale_2")):
    refused(f"7-{_format}-all-without-{_part}", partial(FORMATS[_format], experts=2), without(_part), 3,
            *(f"{EXPERTS}.{e}.{p}_proj.{_part}: is missing" for p in PROJECTIONS for e in range(2)))  # fmt: skip
for _name, _fields, _what in (
    ("symmetric", {"zero_point": False}, "symmetric AWQ (zero_point is not true)"),
    ("gemv", {"version": "gemv"}, "AWQ version 'gemv'"),
    ("gemv-fast", {"version": "GEMV_FAST"}, "AWQ version 'gemv_fast'"),
    ("marlin", {"version": "marlin"}, "AWQ version 'marlin'"),
    ("8-bit", {"bits": 8}, "8-bit AWQ"),
    ("act-order", {"desc_act": True}, "AWQ with act-order (desc_act)"),
    ("one-group", {"group_size": -1}, "AWQ with one group a column (group_size -1)"),
):
    refused(f"7-awq-{_name}", awq, quantization(**_fields), 4, f"config.json: {_what} is not supported", hint=AWQ_ONLY)
for _name, _fields, _found in (
    ("bits-null", {"bits": None}, "bits None, group_size 32"),
    ("bits-text", {"bits": "4"}, "bits '4', group_size 32"),
    ("group-zero", {"group_size": 0}, "bits 4, group_size 0"),
    ("group-true", {"group_size": True}, "bits 4, group_size True"),
):
    refused(f"7-awq-{_name}", awq, quantization(**_fields), 3,
            "config.json: quantization_config has no usable bits and group_size: "
            f"expected whole numbers, found {_found}")  # fmt: skip
refused("7-awq-g-idx", awq, lambda m: m.add(f"{EXPERTS}.2.up_proj.g_idx", tensor("I32", (64,))), 4,
        f"{EXPERTS}.2.up_proj.g_idx ({SINGLE}): is no part of an expert in awq that can be prepared",
        hint="act-order checkpoints cannot be prepared")  # fmt: skip
refused("7-fp8-experts", nvfp4, quantization(quant_algo="FP8"), 4,
        "config.json: ModelOpt algorithm 'FP8' of quant_algo is not supported",
        hint="only NVFP4 and W4A16_NVFP4 experts can be prepared")  # fmt: skip
refused("7-gptq", awq, quantization(quant_method="gptq"), 4, "config.json: quant_method 'gptq' is not supported")
refused("7-no-quantization", awq, lambda m: m.config.pop("quantization_config"), 4,
        "config.json: has no quantization_config")  # fmt: skip

# 8. One tensor of another dtype or shape. Expert 0 and another one: the message must not blame the good ones.
SHAPES = {"qweight": [64, 8], "qzeros": [2, 8], "scales": [2, 64],
          "weight": [64, 32], "weight_scale": [64, 4], "weight_scale_2": []}  # fmt: skip
for _format, _part, _dtype, _wanted, _has in (
    ("awq", "qweight", "F32", "I32", "I32"),
    ("awq", "qzeros", "I64", "I32", "I32"),
    ("awq", "scales", "F32", "F16 or BF16", "F16"),
    ("nvfp4", "weight", "I8", "U8", "U8"),
    ("nvfp4", "weight_scale", "U8", "F8_E4M3", "F8_E4M3"),
    ("nvfp4", "weight_scale", "F8_E5M2", "F8_E4M3", "F8_E4M3"),
    ("nvfp4", "weight_scale_2", "F64", "F32", "F32"),
):
    for _expert in (0, 2):
        _tensor = f"{EXPERTS}.{_expert}.down_proj.{_part}"
        refused(f"8-{_format}-{_part}-as-{_dtype}-of-expert-{_expert}", FORMATS[_format],
                lambda m, name=_tensor, dtype=_dtype: m.change(name, dtype=dtype), 3,
                f"{_tensor} ({SINGLE}): has the wrong dtype: expected {_wanted if _expert == 0 else _has}, "
                f"found {_dtype}")  # fmt: skip
for _format, _part, _shape in (
    ("awq", "qweight", (8, 64)),  # transposed
    ("awq", "qweight", (64, 16)),
    ("awq", "qzeros", (8, 2)),
    ("awq", "scales", (2, 32)),
    ("awq", "scales", (128,)),
    ("nvfp4", "weight", (32, 64)),  # transposed
    ("nvfp4", "weight", (64, 64)),
    ("nvfp4", "weight_scale", (256,)),
    ("nvfp4", "weight_scale_2", (2,)),
    ("nvfp4", "weight_scale_2", (1, 1)),
):
    _tensor = f"{EXPERTS}.2.gate_proj.{_part}"
    refused(f"8-{_format}-{_part}-of-shape-{'x'.join(map(str, _shape))}", FORMATS[_format],
            lambda m, name=_tensor, shape=_shape: m.change(name, shape=shape), 3,
            f"{_tensor} ({SINGLE}): has the wrong shape for this model: "
            f"expected {SHAPES[_part]}, found {list(_shape)}")  # fmt: skip
refused("8-awq-scales-transposed", awq, lambda m: m.change(f"{EXPERTS}.2.gate_proj.scales", shape=(64, 2)), 3,
        f"{EXPERTS}.2.gate_proj.scales ({SINGLE}): its shape says group size 1, config.json says 32: "
        "expected [2, 64], found [64, 2]")  # fmt: skip
refused("8-nvfp4-weight_scale-transposed", nvfp4,
        lambda m: m.change(f"{EXPERTS}.2.gate_proj.weight_scale", shape=(4, 64)), 3,
        f"{EXPERTS}.2.gate_proj.weight_scale ({SINGLE}): its shape says group size 1, config.json says 16: "
        "expected [64, 4], found [4, 64]")  # fmt: skip
for _format, _make in FORMATS.items():
    refused(f"8-{_format}-n-not-a-multiple-of-32", partial(_make, hidden=48), nothing, 4,
            f"{EXPERTS}.0.gate_proj.{'qweight' if _format == 'awq' else 'weight'}: TP size 1 is not possible: "
            "hidden size 48 is not a multiple of 32, which a packed w2 needs",
            hint="TP sizes that work for this checkpoint: none")  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_checkpoint_is_refused_by_name_and_nothing_is_sealed(case: Case, tmp_path: Path) -> None:
    source, out = case.write(tmp_path / "source"), tmp_path / "out"
    before = contents(source)
    result = run(source, out, *case.args)
    assert lines(result) == [f"error: {e.replace('{source}', str(source))}" for e in case.errors]
    assert result.exit_code == case.code
    assert result.stdout == ""
    if case.hint:
        assert lines(result, "next: ") == [f"next: {case.hint}"]
    assert_nothing_sealed(out)
    assert out.exists() == (not case.planned)
    assert not (out / BANK).exists()

    as_json = json.loads(run(source, out, *case.args, "--json").stdout)["error"]
    assert as_json["exit_code"] == case.code
    assert as_json["total"] == len(case.errors)
    assert all("tensor" in problem or "file" in problem for problem in as_json["problems"])
    assert_nothing_sealed(out)
    assert contents(source) == before


# What is odd, but converted.
FAR_LARGER = "largest scale is over 64 times the median of its layer's experts"


def finding(message: str, example: str, count: int = 1, layer: int | None = 0) -> dict[str, Any]:
    return {"message": message, "example": example, "count": count, "layer": layer}


class Odd(NamedTuple):
    make: Callable[[], Made]
    edit: Edit
    after: After
    args: tuple[object, ...]
    findings: list[dict[str, Any]]
    like: bool  # the banks are those of the checkpoint without the oddity


CONVERTED: list[Any] = []


def converted(
    name: str,
    make: Callable[[], Made],
    edit: Edit,
    *findings: dict[str, Any],
    after: After = lambda _: None,
    args: tuple[object, ...] = (),
    like: bool = False,
) -> None:
    CONVERTED.append(pytest.param(Odd(make, edit, after, args, list(findings), like), id=name))


def header_of_100_000(folder: Path) -> None:
    write_file(folder / SINGLE, awq().tensors, header_bytes=100_000)


def stale(folder: Path) -> None:
    """Other bytes under two names, in a shard that the index does not give them to."""
    second = awq(shards=2).shards[SECOND]
    extra = {
        f"{EXPERTS}.0.gate_proj.qweight": tensor("I32", (64, 8)),
        "model.embed_tokens.weight": tensor("BF16", (8, 64)),
    }
    write_file(folder / SECOND, {**second, **extra})


def unindexed(folder: Path) -> None:
    write_file(folder / "consolidated.safetensors", {"model.norm.weight": tensor("BF16", (64,))})


def empty_shard(made: Made) -> None:
    made.shards["model-00000-of-00002.safetensors"] = {}
    made.index = False


def other_globals(made: Made) -> None:
    made.change(f"{EXPERTS}.1.up_proj.weight_scale_2", data=f32(2e-3))
    made.change(f"{EXPERTS}.3.up_proj.weight_scale_2", data=f32(2e-3))


def globals_as_vectors(*experts: int) -> Edit:
    return lambda m: [
        m.change(name, shape=(1,))
        for name in m.tensors
        if name.endswith("_scale_2") and int(name.split(".")[5]) in experts
    ]


def zero_scales(part: str) -> Edit:
    return lambda m: m.change(f"{EXPERTS}.2.up_proj.{part}", data=b"\0")


def quantised_router(format_: str) -> Edit:
    def edit(made: Made) -> None:
        group_size = 32 if format_ == "awq" else None
        experts = expert_tensors("x.", 64, 4 * 8, group_size)
        made.drop("model.layers.0.mlp.gate.weight")
        for name, new in experts.items():
            if name.startswith("x.gate_proj."):
                made.add(f"model.layers.0.mlp.gate.{name.removeprefix('x.gate_proj.')}", new)

    return edit


for _name, _make, _edit, _part, _ in NONFINITE:
    _where = f"{EXPERTS}.2.{_part}"
    _sign = "some scales are negative" if _make is awq else "some block scales are negative"
    _found = [finding(FAR_LARGER, _where)] if "product" in _name else []
    _found += [finding("scales that are not finite in fp16 were kept", _where)]
    _found += [finding(_sign, _where)] if "negative" in _name else []
    converted(f"6-{_name}-allowed", _make, _edit, *_found, args=("--allow-nonfinite",))
converted("2-header-of-100000-bytes", awq, nothing, after=header_of_100_000, like=True)
converted("2-shard-without-tensors", partial(awq, shards=2), empty_shard, like=True)
converted("2-shard-without-tensors-beside-an-index", partial(awq, shards=2), nothing,
          finding("files that the index does not name; ignored", "empty.safetensors", layer=None),
          after=lambda folder: write_file(folder / "empty.safetensors", {}), like=True)  # fmt: skip
converted("3-stale-tensors", partial(awq, shards=2), nothing,
          finding("tensors in shards that the index does not give them to; ignored",
                  f"{EXPERTS}.0.gate_proj.qweight ({SECOND})", 2, None), after=stale, like=True)  # fmt: skip
converted("3-unindexed-file", partial(awq, shards=2), nothing,
          finding("files that the index does not name; ignored", "consolidated.safetensors", layer=None),
          after=unindexed, like=True)  # fmt: skip
converted("3-lone-index-beside-one-file", awq, lambda m: setattr(m, "index", True), like=True)
converted("5-gate-and-up-globals-differ", nvfp4, other_globals,
          finding("gate and up have different global scales", f"{EXPERTS}.1.gate_proj.weight_scale_2", 2))  # fmt: skip
converted("5-globals-of-one-element", nvfp4, globals_as_vectors(0, 1, 2, 3), like=True)
converted("5-globals-of-both-shapes", nvfp4, globals_as_vectors(0, 2), like=True)
converted("6-awq-largest-product", awq, awq_product(4364, 15),  # 65460, which fp16 can hold
          finding(FAR_LARGER, f"{EXPERTS}.2.up_proj.scales"))  # fmt: skip
converted("6-nvfp4-largest-product", nvfp4, nvfp4_code(0x7E, 146.2),
          finding(FAR_LARGER, f"{EXPERTS}.2.down_proj.weight_scale"))  # fmt: skip
converted("6-nvfp4-global-of-1e-40", nvfp4, nvfp4_code(0x38, 1e-40),
          finding("global scale is subnormal", f"{EXPERTS}.2.down_proj.weight_scale_2"))  # fmt: skip
converted("6-nvfp4-global-of-zero", nvfp4, nvfp4_code(0x38, 0.0),
          finding("global scale is zero", f"{EXPERTS}.2.down_proj.weight_scale_2"))  # fmt: skip
converted("6-nvfp4-all-block-scales-zero", nvfp4, zero_scales("weight_scale"),
          finding("all block scales are zero", f"{EXPERTS}.2.up_proj.weight_scale"))  # fmt: skip
converted("6-awq-all-scales-zero", awq, zero_scales("scales"),
          finding("all scales are zero", f"{EXPERTS}.2.up_proj.scales"))  # fmt: skip
converted("10-input-scale-absent-for-some", nvfp4,
          lambda m: m.drop(f"{EXPERTS}.1.up_proj.input_scale", f"{EXPERTS}.3.gate_proj.input_scale"), like=True)  # fmt: skip
for _format, _make in FORMATS.items():
    converted(f"10-{_format}-router-with-quantised-weights", _make, quantised_router(_format), like=True)


@pytest.mark.parametrize("odd", CONVERTED)
def test_an_odd_checkpoint_is_converted_and_what_is_odd_is_noted(odd: Odd, tmp_path: Path) -> None:
    made = odd.make()
    odd.edit(made)
    source, out = made.write(tmp_path / "source"), tmp_path / "out"
    odd.after(source)
    document = seal(source, out, *odd.args)
    assert document["status"] == "sealed"
    findings = list(odd.findings)
    if unneeded := sorted(n for n in made.tensors if n.startswith(EXPERTS) and n.endswith(".input_scale")):
        findings.append(finding(LEFT_OUT, unneeded[0], len(unneeded)))
    assert document["findings"] == findings
    manifest = json.loads((out / "sm70" / "manifest.json").read_bytes())
    assert manifest["findings"] == findings
    assert temporary_files(out) == []
    if odd.like:
        seal(odd.make().write(tmp_path / "clean"), tmp_path / "like")
        assert (out / BANK).read_bytes() == (tmp_path / "like" / BANK).read_bytes()
    assert passed_through(out) == {n: t for n, t in made.tensors.items() if not n.startswith(f"{EXPERTS}.")}
    result = CliRunner().invoke(main, ["verify", str(out), "--source", str(source)])
    assert result.exit_code == 0, result.stderr


def passed_through(out: Path) -> dict[str, Tensor]:
    """What the output's index lists besides the sentinel, read by a few lines of our own."""
    weight_map = json.loads((out / INDEX).read_bytes())["weight_map"]
    found = {}
    for file in set(weight_map.values()):
        data = (out / file).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert weight_map[name] == file
                begin, end = (start + offset for offset in entry["data_offsets"])
                found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[begin:end])
    assert found.keys() == weight_map.keys()
    del found["sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"]
    return found


def test_the_tp_sizes_that_a_refusal_names_do_work(tmp_path: Path) -> None:
    for name, make, sizes in (("awq", awq, (1, 2)), ("nvfp4", nvfp4, (1, 2, 4))):
        source = make().write(tmp_path / name)
        document = seal(source, tmp_path / f"{name}-out", *(a for size in sizes for a in ("--tp-size", size)))
        assert document["tp_sizes"] == list(sizes)


def test_what_allow_nonfinite_keeps_is_what_the_runtime_would_make(tmp_path: Path) -> None:
    source = tmp_path / "awq"
    made = awq()
    awq_scale(NAN)(made)
    seal(made.write(source), tmp_path / "awq-out", "--allow-nonfinite", "--interleave", "off")
    words = load_file(tmp_path / "awq-out" / BANK)["w13_tm_scales"].view(np.uint32)
    assert words[2, 1, 64 + 5] & 0xFFFF == 0x7E00  # the scale as stored
    assert words[2, 1, 64 + 5] >> 16 == 0x7FFF  # and its product, NaN as the GPU writes it
    assert np.isfinite(words.view(np.float16)).sum() == words.size * 2 - 2

    made = nvfp4()
    nvfp4_code(0xFF)(made)
    seal(made.write(tmp_path / "nvfp4"), tmp_path / "nvfp4-out", "--allow-nonfinite")
    scales = load_file(tmp_path / "nvfp4-out" / BANK)["w2_tm_scales"].view(np.uint16)
    assert scales[2, 1, 3] == 0x7FFF
    assert np.isfinite(scales.view(np.float16)).sum() == scales.size - 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_scale_stops_its_layer_and_keeps_those_before(name: str, tmp_path: Path) -> None:
    made, out = FORMATS[name](layers=2), tmp_path / "out"
    bad = f"model.layers.1.mlp.experts.3.down_proj.{SCALES[name]}"
    made.set_item(bad, 0, NAN if name == "awq" else b"\x7f")
    source = made.write(tmp_path / "source")
    result = run(source, out)
    assert result.exit_code == 3
    assert [line.split(" (")[0] for line in lines(result)] == [f"error: {bad}"]
    assert_nothing_sealed(out)
    assert sorted(p.name for p in (out / "sm70/tp1/rank0").iterdir()) == ["layer-00000.safetensors"]
    document = seal(source, out, "--allow-nonfinite")
    assert (document["layers_resumed"], document["layers_prepared"]) == ([0], [1])


# All problems at once.
def shown(problems: list[dict[str, Any]]) -> list[str]:
    return [
        f"error: {p['tensor']} ({p['file']}): {p['message']}: expected {p['expected']}, found {p['actual']}"
        for p in problems
    ]


def test_thirteen_wrong_tensors_are_ten_lines_and_a_count(tmp_path: Path) -> None:
    made = awq()
    wrong = [f"{EXPERTS}.{e}.{p}_proj.scales" for p in PROJECTIONS for e in range(4)] + [f"{EXPERTS}.2.up_proj.qweight"]
    for name in wrong:
        made.change(name, shape=(3, 8))
    source, out = made.write(tmp_path / "source"), tmp_path / "out"
    result = run(source, out)
    assert result.exit_code == 3
    error = json.loads(run(source, out, "--json").stdout)["error"]
    assert (error["kind"], error["exit_code"], error["total"]) == ("checkpoint", 3, 13)
    assert sorted(p["tensor"] for p in error["problems"]) == sorted(wrong)
    assert lines(result) == [*shown(error["problems"][:10]), "... and 3 more problems like these"]
    assert not out.exists()


def test_problems_of_many_kinds_come_at_once_and_the_lowest_code_wins(tmp_path: Path) -> None:
    made = awq(layers=2)
    made.change(f"{EXPERTS}.0.down_proj.qzeros", dtype="I64")
    made.change(f"{EXPERTS}.1.down_proj.qweight", shape=(8, 64))
    made.drop(f"{EXPERTS}.3.up_proj.scales")
    made.add(f"{EXPERTS}.2.up_proj.g_idx", tensor("I32", (64,)))
    made.drop_expert(3, layer=1)
    made.add("model.layers.1.mlp.experts.0.gate_proj.nvfp4_csf", tensor("U8", (4,)))
    made.unquantise("model.layers.1.mlp.experts.1.up_proj")
    source, out = made.write(tmp_path / "source"), tmp_path / "out"
    result = run(source, out, "--tp-size", 4)
    assert result.exit_code == 3
    assert [line.removeprefix("error: ").replace(f" ({SINGLE})", "") for line in lines(result)] == [
        f"{EXPERTS}.3.up_proj.scales: is missing",
        f"{EXPERTS}.1.down_proj.qweight: has the wrong shape for this model: expected [64, 8], found [8, 64]",
        f"{EXPERTS}.0.down_proj.qzeros: has the wrong dtype: expected I32, found I64",
        "model.layers.1.mlp.experts.3.gate_proj.qweight: expert 3 of 4 has no tensors",
        f"{EXPERTS}.2.up_proj.g_idx: is no part of an expert in awq that can be prepared",
        "model.layers.1.mlp.experts.1.up_proj.weight: is not quantised (BF16), but other experts of its layer are",
        "model.layers.1.mlp.experts.0.gate_proj.nvfp4_csf: is no part of an expert in awq that can be prepared",
        (
            f"{EXPERTS}.0.gate_proj.qweight: TP size 4 is not possible: "
            "each rank would hold 16 of the 64 intermediate channels, not a multiple of the group size 32"
        ),
    ]
    assert not out.exists()


def test_of_very_many_problems_all_are_counted_and_a_hundred_kept(tmp_path: Path) -> None:
    made = awq(experts=40)
    for name in made.tensors:
        if name.endswith(".scales"):
            made.change(name, dtype="F32")
    source = made.write(tmp_path / "source")
    error = json.loads(run(source, tmp_path / "out", "--json").stdout)["error"]
    assert (error["total"], len(error["problems"])) == (120, 100)
    assert lines(run(source, tmp_path / "out"))[-1] == "... and 110 more problems like these"


# 9. The output folder.
@pytest.fixture
def source(tmp_path: Path) -> Path:
    return awq().write(tmp_path / "source")


def assert_output_refused(result: Result, *errors: str) -> None:
    assert lines(result) == [f"error: {e}" for e in errors]
    assert result.exit_code == 5
    assert result.stdout == ""


@pytest.mark.parametrize("where", ["source", "source/out", "source/a/b", "."])
def test_9_an_output_that_overlaps_the_checkpoint_is_refused(where: str, source: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    out = tmp_path / where
    assert_output_refused(run(source, out), f"{out.resolve()}: output and checkpoint overlap")
    assert_output_refused(run(source, out, "--dry-run"), f"{out.resolve()}: output and checkpoint overlap")
    assert contents(tmp_path) == before
    assert not (source / "a").exists()


def test_9_an_output_that_leads_into_the_checkpoint_by_a_symlink_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    out = tmp_path / "link" / "out"
    assert_output_refused(run(source, out), f"{source.resolve() / 'out'}: output and checkpoint overlap")
    assert not (source / "out").exists()


def test_9_a_disk_with_one_byte_too_few_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = json.loads(run(source, tmp_path / "out", "--dry-run", "--json").stdout)["output_bytes"]

    def with_free(count: int) -> None:
        state = list(os.statvfs("/"))
        state[1], state[4] = 1, count  # f_frsize, f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(state))

    with_free(needed - 1)
    assert_output_refused(
        run(source, tmp_path / "out"),
        f"{tmp_path}: has not enough free space: expected {needed} bytes free, found {needed - 1}",
    )
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    with_free(needed)
    seal(source, tmp_path / "out")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion of `source` gives."""
    folder = tmp_path_factory.mktemp("clean")
    seal(awq().write(folder / "source"), folder / "out")
    return contents(folder / "out")


@pytest.mark.parametrize(
    ("function", "call"),
    [
        *(("pwrite", call) for call in (1, 2, 3, 10, *range(18, 31))),
        *(("fsync", call) for call in range(1, 11)),  # some disks tell only then that they are full
        *(("rename", call) for call in range(1, 10)),
    ],
)
def test_9_a_disk_that_fills_while_it_is_written_leaves_nothing_sealed(
    function: str,
    call: int,
    source: Path,
    tmp_path: Path,
    clean: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The n-th call and all after it fail: in the journal, a bank, what passes through, the manifest."""
    real, calls = getattr(os, function), 0

    def full(*args: Any, **options: Any) -> Any:
        nonlocal calls
        # Folders are synced after a rename, when the file is there.
        calls += function != "fsync" or stat.S_ISREG(os.fstat(args[0]).st_mode)
        if calls >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(os, function, full)
    out = tmp_path / "out"
    result = run(source, out)
    assert calls >= call
    assert result.exit_code == 5
    assert [line.split(": ", 2)[2] for line in lines(result)] == ["cannot be written: No space left on device"]
    assert lines(result, "next: ") == [
        "next: free some space (or mend the disk), then run the same command again: it resumes"
    ]
    assert not (out / "sm70" / "manifest.json").exists()
    assert temporary_files(out) == []
    monkeypatch.undo()
    seal(source, out)
    assert contents(out) == clean


def test_9_a_folder_that_is_not_writable_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A superuser may write anywhere, so the question is answered for it.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    assert_output_refused(run(source, tmp_path / "out"), f"{tmp_path}: is not writable")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="a superuser may write anywhere")
def test_9_a_read_only_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    assert_output_refused(run(source, tmp_path / "locked" / "out"), f"{tmp_path / 'locked'}: is not writable")


def test_9_an_output_below_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    out = tmp_path / "file" / "out"
    assert_output_refused(run(source, out), f"{out}: cannot be created: Not a directory")
    out = tmp_path / "file"
    assert_output_refused(run(source, out), f"{out}: cannot be read as a folder: Not a directory")
    assert out.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", SINGLE, "sm70/other.txt", "sm70/tp1/rank0/layer-00000.safetensors"]
)
def test_9_a_folder_with_contents_of_others_is_refused_even_with_overwrite(
    name: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_bytes(b"mine")
    message = f"{out}: is not empty, and holds no manifest or journal of this tool"
    assert_output_refused(run(source, out), message)
    assert_output_refused(run(source, out, "--overwrite"), f"{message} that would say what --overwrite may remove")
    assert contents(out) == {name: b"mine"}


def other_source(source: Path) -> None:
    """The same checkpoint with another config.json."""
    with edited(source / "config.json") as config:
        config["vocab_size"] = 9


OTHER_PLANS: dict[str, tuple[After, tuple[object, ...], str]] = {
    "config": (other_source, (), "source.config"),
    "interleave": (lambda _: None, ("--interleave", "off"), "layout.interleave_gate_up"),
    "layout": (lambda _: None, ("--layout", "awq-compact"), "layout.name"),
    "hash": (lambda _: None, ("--hash", "sha256"), "hash"),
}


def interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a run leaves it that failed before its first layer; gives its journal."""
    monkeypatch.setattr("sm70_convert.experts.ExpertReader.read", lambda *_: 1 / 0)
    assert run(source, out).exit_code == 1
    monkeypatch.undo()
    return out / "sm70" / "journal.jsonl"


@pytest.mark.parametrize("name", OTHER_PLANS)
def test_9_a_sealed_folder_of_another_plan_is_refused_and_kept(name: str, source: Path, tmp_path: Path) -> None:
    change, args, field = OTHER_PLANS[name]
    out = tmp_path / "out"
    seal(source, out)
    before = contents(out)
    change(source)
    result = run(source, out, *args)
    assert result.exit_code == 5
    assert [line.split(": expected ")[0] for line in lines(result)] == [
        f"error: sm70/manifest.json: belongs to another plan: {field} differs"
    ]
    assert lines(result, "next: ") == ["next: use another --out, or --overwrite to start over"]
    assert contents(out) == before
    seal(source, out, *args, "--overwrite")
    seal(source, tmp_path / "clean", *args)
    assert contents(out) == contents(tmp_path / "clean")


@pytest.mark.parametrize("name", [*OTHER_PLANS, "tp-sizes"])
def test_9_an_unfinished_folder_of_another_plan_is_refused(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two differences the first by name is told: another hash changes every digest, too.
    change, args, field = {**OTHER_PLANS, "tp-sizes": (lambda _: None, ("--tp-size", 2), "tp_sizes")}[name]
    out = tmp_path / "out"
    interrupted(source, out, monkeypatch)
    before = contents(out)
    change(source)
    result = run(source, out, *args)
    assert result.exit_code == 5
    assert [line.split(": expected ")[0] for line in lines(result)] == [
        f"error: sm70/journal.jsonl: belongs to another plan: {field} differs"
    ]
    assert_nothing_sealed(out)
    assert contents(out) == before
    seal(source, out, *args, "--overwrite")


def test_9_an_unfinished_folder_of_a_touched_shard_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, monkeypatch)
    os.utime(source / SINGLE, ns=(1, 1))
    result = run(source, out)
    assert result.exit_code == 5
    assert lines(result)[0].startswith(f"error: sm70/journal.jsonl: belongs to another plan: mtimes.{SINGLE} differs")
    assert_nothing_sealed(out)


def digested(document: dict[str, Any]) -> bytes:
    """A manifest's bytes with a digest that is right for them."""
    document.pop("manifest_digest", None)
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**document, "manifest_digest": blake3(data).hexdigest()}).encode()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_version", 2, "other format version: expected 1, found 2"),
        ("format_version", None, "other format version: expected 1, found None"),
        ("format_version", "1", "other format version: expected 1, found '1'"),
        ("tool_version", "0.0.9", "belongs to another plan: tool_version differs: expected 0.0.9, found {version}"),
    ],
)
def test_9_a_sealed_folder_of_another_version_is_refused_and_kept(
    field: str, value: object, message: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    seal(source, out)
    path = out / "sm70" / "manifest.json"
    document = json.loads(path.read_bytes())
    version = document["tool_version"]
    assert json.loads(digested(dict(document))) == document  # the digest here is the tool's
    document[field] = value
    path.write_bytes(digested(document))
    before = contents(out)
    for args in ((), ("--tp-size", 2)):
        assert_output_refused(run(source, out, *args), f"sm70/manifest.json: {message.format(version=version)}")
        assert contents(out) == before


def test_9_a_sealed_folder_whose_manifest_was_edited_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seal(source, out)
    with edited(out / "sm70" / "manifest.json") as document:
        document["tool_version"] = "0.0.9"
    before = contents(out)
    message = "sm70/manifest.json: was altered or damaged: its own digest does not match"
    assert_output_refused(run(source, out), message)
    result = run(source, out, "--overwrite")
    assert_output_refused(result, f"{out}: --overwrite cannot tell which files are ours: {message}")
    assert contents(out) == before


@pytest.mark.parametrize(("field", "value"), [("format_version", 2), ("tool_version", "0.0.9")])
def test_9_an_unfinished_folder_of_another_version_is_refused(
    field: str, value: object, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    journal = interrupted(source, out, monkeypatch)
    head = json.loads(journal.read_bytes().split(b"\n")[0])
    found = head["plan"][field]
    head["plan"][field] = value
    journal.write_bytes(json.dumps(head).encode() + b"\n")
    assert_output_refused(
        run(source, out),
        f"sm70/journal.jsonl: belongs to another plan: {field} differs: expected {value}, found {found}",
    )
    assert_nothing_sealed(out)


@pytest.mark.parametrize(
    "data", [b"", b"{}\n", b"not json\n", b'{"plan": [], "source": "", "layers": "0", "outputs": ["../x"]}\n']
)
def test_9_a_damaged_journal_is_refused(
    data: bytes, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(source, out, monkeypatch).write_bytes(data)
    assert_output_refused(run(source, out), "sm70/journal.jsonl: is damaged, or no journal of this tool")
    assert_nothing_sealed(out)


def test_9_a_prepared_folder_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    seal(source, tmp_path / "out")
    result = run(tmp_path / "out", tmp_path / "again")
    assert result.exit_code == 4
    assert lines(result) == [f"error: {tmp_path / 'out'}: is a prepared folder already"]
    assert not (tmp_path / "again").exists()


def test_a_checkpoint_that_changes_while_it_is_converted_is_not_sealed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sm70_convert.seal as module

    write = module.write_passthrough

    def then_touch(*args: Any) -> Any:
        yield from write(*args)
        os.utime(source / SINGLE, ns=(1, 1))

    monkeypatch.setattr(module, "write_passthrough", then_touch)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3
    assert lines(result)[0].startswith(f"error: {SINGLE}: changed while it was converted: expected ")
    assert not (tmp_path / "out" / "sm70" / "manifest.json").exists()
    assert temporary_files(tmp_path / "out") == []


def test_a_source_file_that_prepared_folders_use_themselves_is_refused(tmp_path: Path) -> None:
    made = awq()
    made.others["SHA256SUMS"] = b""
    source = made.write(tmp_path / "source")
    (source / "sm70").mkdir()
    (source / "sm70" / "notes.txt").write_bytes(b"")
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3
    what = "has a name that prepared folders use for themselves"
    assert lines(result) == [f"error: SHA256SUMS: {what}", f"error: sm70/notes.txt: {what}"]
    assert not (tmp_path / "out").exists()
