"""Bad checkpoints by item of the table of odd and bad inputs, each with what it gets. Run by test_bad_input_table.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner, Result

from made import (
    EXPERTS,
    INDEX,
    PROJECTIONS,
    SINGLE,
    Made,
    awq,
    bf16,
    edited,
    f16,
    f32,
    fuse,
    nvfp4,
    tensor,
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
Before = Callable[[Path, Path, pytest.MonkeyPatch], object]


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


def interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a run leaves it that failed before its first layer; gives its journal."""
    monkeypatch.setattr("sm70_convert.experts.ExpertReader.read", lambda *_: 1 / 0)
    assert run(source, out).exit_code == 1
    monkeypatch.undo()
    return out / "sm70" / "journal.jsonl"


class Row(NamedTuple):
    """One bad or odd input: what makes it, and what it gets. The name begins with its item of the table of such inputs."""

    name: str
    make: Callable[[], Made]
    edit: Edit
    code: int
    errors: tuple[str, ...] = ()
    findings: tuple[dict[str, Any], ...] = ()
    after: After = lambda _: None
    args: tuple[object, ...] = ()
    hint: str | None = None
    planned: bool = True  # refused before any byte is written
    like: bool = False  # converted: the banks are those of the checkpoint without the oddity
    out: str = "out"  # beside the checkpoint's folder `source`
    before: Before = lambda *_: None

    @property
    def item(self) -> int:
        return int(self.name.split("-")[0])

    def write(self, folder: Path) -> Path:
        made = self.make()
        self.edit(made)
        made.write(folder)
        self.after(folder)
        return folder


ROWS: list[Row] = []


def refused(
    name: str,
    make: Callable[[], Made],
    edit: Edit,
    code: int,
    *errors: str,
    **fields: Any,
) -> None:
    ROWS.append(Row(name, make, edit, code, errors, **fields))


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
for _key, _value, _message in (
    (
        "num_local_experts",
        8,
        "num_experts and num_local_experts contradict each other: expected num_local_experts 4, found 8",
    ),
    ("num_experts_per_tok", 5, "num_experts_per_tok is more than there are experts: expected at most 4, found 5"),
):
    refused(f"7-config-{_key}", awq, lambda m, key=_key, value=_value: m.config.update({key: value}), 3,
            f"config.json: {_message}", hint="mend config.json after the model's own")  # fmt: skip
for _key, _other, _value in (("bits", "w_bit", 8), ("group_size", "q_group_size", 64)):
    refused(f"7-awq-{_other}", awq, quantization(**{_other: _value}), 3,
            f"config.json: {_key} and {_other} contradict each other: "
            f"expected {_other} {4 if _key == 'bits' else 32}, found {_value}")  # fmt: skip

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
