"""Our reader of safetensors headers against the safetensors library: the same of every valid file, and no kinder to a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from sm70_convert.errors import CheckpointError, IntegrityError
from sm70_convert.safetensors_header import BITS, Header, build_header, read_file_header, read_header

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16, "U32": np.uint32,
    "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip

# Any text that UTF-8 can hold.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tensor_names = texts.filter(lambda name: name not in ("", "__metadata__"))
shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
tensors = st.dictionaries(
    tensor_names,
    st.sampled_from(list(DTYPES.values())).flatmap(lambda dtype: arrays.arrays(dtype, shapes)),
    max_size=5,
)
# More than one key comes in no fixed order.
metadatas = st.dictionaries(texts, texts, max_size=1)


def read(data: bytes) -> Header:
    return read_header(lambda offset, count: data[offset : offset + count], len(data), "x.safetensors")


def library_refuses(data: bytes) -> bool:
    try:
        deserialize(data)
    except SafetensorError:
        return True
    return False


def we_refuse(data: bytes) -> bool:
    try:
        read(data)
    except CheckpointError:
        return True
    return False


def file_of(header: object, data: bytes = b"") -> bytes:
    """A file of a header (text, bytes, or a document) and data."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


SMALL = save({"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.float32([1, 2])}, {"format": "pt"})


# Valid files.
@given(tensors, metadatas)
def test_a_valid_file_is_read_as_the_library_reads_it(
    made: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]
) -> None:
    data = save(made, metadata or None)
    header = read(data)
    assert header.metadata == metadata
    assert header.data_start == 8 + int.from_bytes(data[:8], "little")
    library = {
        name: (fields["dtype"], tuple(fields["shape"]), bytes(fields["data"])) for name, fields in deserialize(data)
    }
    ours = {name: (e.dtype, e.shape, data[e.offset : e.offset + e.nbytes]) for name, e in header.tensors.items()}
    assert ours == library
    assert ours == {n: (_name_of(a), a.shape, a.tobytes()) for n, a in made.items()}
    offsets = [e.offset for e in header.tensors.values()]
    assert offsets == sorted(offsets)


def _name_of(array: np.ndarray[Any, Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if array.dtype == dtype)


@given(tensors, metadatas)
def test_a_header_is_built_byte_for_byte_as_the_library_writes_it(
    made: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]
) -> None:
    assume(made or metadata)  # of neither, safetensors 0.8 writes a header that it cannot read itself
    data = save(made, metadata)
    length = 8 + int.from_bytes(data[:8], "little")
    order = [name for name in json.loads(data[8:length]) if name != "__metadata__"]  # the library sorts
    built = build_header([(name, _name_of(made[name]), made[name].shape) for name in order], metadata)
    assert built.raw == data[:length]
    assert built.raw + b"".join(made[name].tobytes() for name in order) == data
    assert built._replace(raw=b"") == read(data)
    assert list(built.tensors) == order


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_has_the_size_that_the_library_gives_it(dtype: str) -> None:
    size = BITS[dtype]  # bytes of eight elements
    data = file_of({"a": entry(dtype, [2, 4], 0, size)}, bytes(size))
    assert read(data).tensors["a"] == (dtype, (2, 4), len(data) - size, size)
    assert not library_refuses(data)
    for wrong in (size - 1, size + 1):
        bad = file_of({"a": entry(dtype, [2, 4], 0, wrong)}, bytes(wrong))
        assert library_refuses(bad)
        assert we_refuse(bad)
    assert build_header([("a", dtype, (2, 4))], {}).tensors["a"].nbytes == size


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    data = file_of({"z": entry("U8", [1], 3, 4), "m": entry("U8", [3], 0, 3), "e": entry("U8", [0], 3, 3)}, b"abcd")
    assert list(read(data).tensors) == ["m", "e", "z"]
    assert read(data).tensors["z"].offset == len(data) - 1


def test_a_file_without_tensors_is_read() -> None:
    for data in (file_of("{}"), file_of("{}      "), save({}), save({}, {"format": "pt"})):
        assert read(data).tensors == {}
        assert not library_refuses(data)


def test_a_header_of_exactly_100000_bytes_is_read() -> None:
    data = file_of(json.dumps({"a": entry("U8", [2], 0, 2)}).ljust(100_000), b"ab")
    assert read(data).tensors["a"] == ("U8", (2,), 100_008, 2)
    assert not library_refuses(data)


# Bad files: (file, tensor, message). The library refuses all of them.
class Bad(NamedTuple):
    data: bytes
    message: str
    tensor: str | None = None


ENTRY = "header entry is not exactly a dtype, a shape of sizes and a pair of data_offsets"
PLACE = "data overlaps another tensor's or leaves a gap"
U8 = entry("U8", [2], 0, 2)
BAD = {
    "empty": Bad(b"", "is too short for a safetensors file"),
    "seven-bytes": Bad(b"1234567", "is too short for a safetensors file"),
    "length-beyond-the-file": Bad(b"\x10" + bytes(7) + b"{}", "is truncated inside its header"),
    "no-header": Bad(bytes(8), "is not a safetensors file: its header does not start with '{'"),
    "not-an-object": Bad(file_of("[]"), "is not a safetensors file: its header does not start with '{'"),
    "pickle": Bad(file_of(b"\x80\x04K\x01."), "is not a safetensors file: its header does not start with '{'"),
    "not-json": Bad(file_of("{a}"), "not valid JSON"),
    "two-documents": Bad(file_of("{}{}"), "not valid JSON"),
    "padded-with-nul": Bad(file_of("{}\0\0"), "not valid JSON"),
    "deep": Bad(file_of('{"a":' + "[" * 100_000), "not valid JSON: nested too deeply"),
    "bytes-after-the-last": Bad(file_of({"a": U8}, b"abc"), "has bytes after its last tensor"),
    "bytes-without-tensors": Bad(file_of("{}", b"a"), "has bytes after its last tensor"),
    "truncated": Bad(file_of({"a": U8}, b"a"), "is truncated"),
    "overlap": Bad(file_of({"a": U8, "b": entry("U8", [2], 1, 3)}, b"abc"), PLACE, "b"),
    "same-place": Bad(file_of({"a": U8, "b": U8}, b"ab"), PLACE, "b"),
    "gap": Bad(file_of({"a": U8, "b": entry("U8", [2], 3, 5)}, b"abcde"), PLACE, "b"),
    "gap-at-the-start": Bad(file_of({"a": entry("U8", [2], 1, 3)}, b"abc"), PLACE, "a"),
    "empty-tensor-inside-another": Bad(file_of({"a": U8, "b": entry("U8", [0], 1, 1)}, b"ab"), PLACE, "b"),
    "size-unlike-shape": Bad(
        file_of({"a": entry("F32", [2], 0, 4)}, b"abcd"), "data_offsets span 4 bytes, but F32 [2] takes 8", "a"
    ),
    "size-of-no-whole-byte": Bad(
        file_of({"a": entry("F4", [3], 0, 2)}, b"ab"), "data_offsets span 2 bytes, but F4 [3] takes 1.5", "a"
    ),
    "backwards": Bad(file_of({"a": entry("U8", [2], 2, 0)}, b"ab"), "data_offsets span -2 bytes, but U8 [2] takes 2", "a"),
    "unknown-dtype": Bad(file_of({"a": entry("F7", [2], 0, 2)}, b"ab"), "unknown dtype 'F7'", "a"),
    "dtype-in-small-letters": Bad(file_of({"a": entry("u8", [2], 0, 2)}, b"ab"), "unknown dtype 'u8'", "a"),
    "dtype-null": Bad(file_of({"a": entry(None, [2], 0, 2)}, b"ab"), ENTRY, "a"),
    "dtype-list": Bad(file_of({"a": entry(["U8"], [2], 0, 2)}, b"ab"), ENTRY, "a"),
    "shape-text": Bad(file_of({"a": entry("U8", "2", 0, 2)}, b"ab"), ENTRY, "a"),
    "shape-negative": Bad(file_of({"a": entry("U8", [-2], 0, 2)}, b"ab"), ENTRY, "a"),
    "shape-two-negatives": Bad(file_of({"a": entry("U8", [-1, -2], 0, 2)}, b"ab"), ENTRY, "a"),
    "shape-float": Bad(file_of({"a": entry("U8", [2.0], 0, 2)}, b"ab"), ENTRY, "a"),
    "shape-true": Bad(file_of({"a": entry("U8", [True], 0, 1)}, b"a"), ENTRY, "a"),
    "offset-negative": Bad(file_of({"a": entry("U8", [2], -2, 0)}, b""), ENTRY, "a"),
    "offset-float": Bad(file_of({"a": entry("U8", [2], 0.0, 2)}, b"ab"), ENTRY, "a"),
    "offset-of-2-to-the-64": Bad(file_of({"a": entry("U8", [2], 0, 2**64)}, b"ab"), ENTRY, "a"),
    "one-offset": Bad(file_of({"a": entry("U8", [0], 0)}), ENTRY, "a"),
    "three-offsets": Bad(file_of({"a": entry("U8", [2], 0, 2, 4)}, b"ab"), ENTRY, "a"),
    "no-dtype": Bad(file_of({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"ab"), ENTRY, "a"),
    "no-shape": Bad(file_of({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, b"ab"), ENTRY, "a"),
    "entry-null": Bad(file_of({"a": None}), ENTRY, "a"),
    "entry-text": Bad(file_of({"a": "U8"}), ENTRY, "a"),
    "metadata-of-numbers": Bad(
        file_of({"__metadata__": {"a": 1}, "a": U8}, b"ab"), "header's __metadata__ is not a map of strings"
    ),
    "metadata-like-an-entry": Bad(file_of({"__metadata__": U8}, b"ab"), "header's __metadata__ is not a map of strings"),
    "metadata-a-list": Bad(file_of({"__metadata__": []}), "header's __metadata__ is not a map of strings"),
    "metadata-twice": Bad(file_of('{"__metadata__":{},"__metadata__":{}}'), "not valid JSON: duplicate key '__metadata__'"),
    "field-twice": Bad(
        file_of('{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
        "not valid JSON: duplicate key 'dtype'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_both_and_named(name: str) -> None:
    bad = BAD[name]
    assert library_refuses(bad.data)
    with pytest.raises(CheckpointError) as caught:
        read(bad.data)
    (problem,) = caught.value.problems
    assert problem.message == bad.message or (
        bad.message == "not valid JSON" and problem.message.startswith(bad.message)
    )
    assert (problem.file, problem.tensor) == ("x.safetensors", bad.tensor)


# What is easily let through: Python's json and its numbers are kinder than the library's.
KINDER = {
    "utf-16": file_of(json.dumps({"a": U8}).encode("utf-16-le"), b"ab"),
    "utf-32": file_of(json.dumps({"a": U8}).encode("utf-32-le"), b"ab"),
    "lone-surrogate-as-bytes": file_of(
        json.dumps({"\ud800": U8}, ensure_ascii=False).encode("utf-8", "surrogatepass"), b"ab"
    ),
    "lone-surrogate-as-escape": file_of(json.dumps({"\ud800": U8}), b"ab"),
    "lone-surrogate-in-metadata": file_of(json.dumps({"__metadata__": {"a": "\udfff"}})),
    "invalid-utf-8": file_of(b'{"\xff":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
    "minus-zero-offset": file_of('{"a":{"dtype":"U8","shape":[2],"data_offsets":[-0,2]}}', b"ab"),
    "minus-zero-shape": file_of('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
    # 19 times that number is 2 modulo 2**64.
    "shape-overflows-to-the-right-size": file_of({"a": entry("U8", [19, 970881267037344822], 0, 2)}, b"ab"),
    "bits-overflow-to-nothing": file_of({"a": entry("F64", [2**58, 8], 0, 0)}),
    "shape-overflows-before-a-zero": file_of({"a": entry("U8", [2**59, 2**59, 0], 0, 0)}),
    "not-a-number": file_of('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}', b"ab"),
    "control-character": file_of('{"a\n":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
    "huge-number": file_of('{"a":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,2]}}', b"ab"),
    "number-of-4000-digits": file_of('{"a":{"dtype":"U8","shape":[' + "9" * 4000 + '],"data_offsets":[0,2]}}', b"ab"),
    "product-beyond-a-float": file_of({"a": entry("U8", [2**59] * 32, 0, 0)}),
}


@pytest.mark.parametrize("name", KINDER)
def test_what_the_library_refuses_we_refuse(name: str) -> None:
    assert library_refuses(KINDER[name])
    assert we_refuse(KINDER[name])


# Where we are stricter on purpose.
STRICTER = {
    "name-twice": Bad(
        file_of(f'{{"a":{json.dumps(U8)},"a":{json.dumps(U8)}}}', b"ab"), "not valid JSON: duplicate key 'a'"
    ),
    "metadata-key-twice": Bad(file_of('{"__metadata__":{"a":"","a":""}}'), "not valid JSON: duplicate key 'a'"),
    "another-field": Bad(file_of({"a": {**U8, "x": 1}}, b"ab"), ENTRY, "a"),
    "entry-as-list": Bad(file_of({"a": ["U8", [2], [0, 2]]}, b"ab"), ENTRY, "a"),
    "no-name": Bad(file_of({"": U8}, b"ab"), "a tensor name has 0 characters, not 1 to 4096"),
    "name-of-4097": Bad(file_of({"a" * 4097: U8}, b"ab"), "a tensor name has 4097 characters, not 1 to 4096"),
    "33-dimensions": Bad(file_of({"a": entry("U8", [1] * 33, 0, 1)}, b"a"), ENTRY, "a"),
    "git-lfs": Bad(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "is a git-lfs pointer, not the file itself",
    ),
}


@pytest.mark.parametrize("name", STRICTER)
def test_what_could_be_read_in_two_ways_or_fill_the_memory_is_refused(name: str) -> None:
    bad = STRICTER[name]
    with pytest.raises(CheckpointError) as caught:
        read(bad.data)
    (problem,) = caught.value.problems
    assert (problem.message, problem.tensor) == (bad.message, bad.tensor)


def test_the_largest_name_and_most_dimensions_are_read() -> None:
    data = file_of({"a" * 4096: entry("U8", [1] * 32, 0, 1)}, b"a")
    assert read(data).tensors["a" * 4096].shape == (1,) * 32


@pytest.mark.parametrize("size", range(len(SMALL)))
def test_a_file_cut_at_any_byte_is_refused(size: int) -> None:
    assert library_refuses(SMALL[:size])
    assert we_refuse(SMALL[:size])


def test_a_longer_file_is_refused() -> None:
    assert not we_refuse(SMALL)
    assert we_refuse(SMALL + b"\0")


@given(st.data())
def test_a_file_with_changed_bytes_is_refused_if_the_library_refuses_it(draw: st.DataObject) -> None:
    """One run of its header is replaced; the header's length stays right."""
    header = bytearray(SMALL[8 : 8 + int.from_bytes(SMALL[:8], "little")])
    at = draw.draw(st.integers(0, len(header)), label="at")
    count = draw.draw(st.integers(0, 3), label="count")
    likely = st.sampled_from(
        [b"", b"-", b"0", b"1", b'"', b",", b"[", b"]", b"{", b"}", b"\\", b"\0", b" ", b":", b"e1", b".0"]
    )
    header[at : at + count] = draw.draw(likely | st.binary(max_size=4), label="new")
    data = file_of(bytes(header), SMALL[-20:])
    if library_refuses(data):
        assert we_refuse(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    if library_refuses(data):
        assert we_refuse(data)


# Reading.
def test_a_header_over_the_limit_is_refused_unread() -> None:
    asked: list[tuple[int, int]] = []

    def record(offset: int, count: int) -> bytes:
        asked.append((offset, count))
        return ((100_000_001).to_bytes(8, "little") + b"{").ljust(count)

    with pytest.raises(
        CheckpointError, match=r"header is over the limit: expected at most 100000000 bytes, found 100000001"
    ):
        read_header(record, 1 << 40, "x.safetensors")
    assert asked == [(0, 128)]


def test_a_file_that_becomes_shorter_meanwhile_is_refused() -> None:
    answers = iter([SMALL[:128], SMALL[:20]])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        read_header(lambda *_: next(answers), len(SMALL), "x.safetensors")


def test_only_the_header_is_read() -> None:
    end = 0

    def watch(offset: int, count: int) -> bytes:
        nonlocal end
        end = max(end, offset + count)
        return SMALL[offset : offset + count]

    big = save({"a": np.zeros(10_000, np.uint8)})
    read_header(lambda o, c: (watch(o, c), big[o : o + c])[1], len(big), "x.safetensors")
    assert end == max(128, len(big) - 10_000)


def test_a_file_is_read_by_path_and_errors_are_of_the_kind_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "y.safetensors"
    path.write_bytes(SMALL)
    assert read_file_header(path, "y") == read(SMALL)
    path.write_bytes(SMALL[:-1])
    with pytest.raises(IntegrityError, match=r"^y: is truncated: expected "):
        read_file_header(path, "y", error=IntegrityError)
    with pytest.raises(CheckpointError, match=r"^gone: cannot be read: No such file or directory"):
        read_file_header(tmp_path / "gone", "gone")
    with pytest.raises(CheckpointError, match=r"^folder: cannot be read: Is a directory"):
        read_file_header(tmp_path, "folder")
