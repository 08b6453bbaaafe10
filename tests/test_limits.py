"""Documents made to fill the memory: each is refused in little memory and soon; large real ones are read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import pytest

from made import INDEX, awq
from sm70_convert.checkpoint import parse_index
from sm70_convert.errors import CheckpointError
from sm70_convert.safetensors_header import read_header
from sm70_convert.strict_json import load_object

SHARD = "model.safetensors"
MAX_HEADER, MAX_INDEX, MAX_JSON = 99_999_992, 50_000_000, 16_000_000
MEMORY = 200 << 20
# What a process took at most, in kB. ru_maxrss would begin with what the process that starts it takes.
PEAK = """
import re, sys
from pathlib import Path
def peak():
    return re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]
"""
# Runs the command line and says on a line of its own how much memory that took.
# The processor's time is limited: it goes by the work to do, not by what else the machine does.
CHILD = f"""{PEAK}
import resource
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
from sm70_convert.cli import main
try:
    main(sys.argv[1:])
finally:
    print("\\n" + peak(), file=sys.stderr)
"""


class Ran(NamedTuple):
    code: int
    errors: list[str]
    memory: int


def run(*args: object) -> Ran:
    child = subprocess.run([sys.executable, "-c", CHILD, *map(str, args)], capture_output=True, text=True, timeout=60)
    *lines, memory = child.stderr.splitlines()
    assert "Traceback" not in child.stderr
    print(f"{int(memory) >> 10} MB")  # noqa: T201 - pytest -rP shows it
    return Ran(child.returncode, [line for line in lines if line.startswith("error: ")], int(memory) << 10)


def write(path: Path, pieces: Iterator[str], size: int, *, header: bool) -> None:
    """Writes pieces while they fit into `size` bytes, as the header of a safetensors file if asked for."""
    with path.open("wb") as file:
        if header:
            file.write(bytes(8))
        left = size
        for piece in pieces:
            data = piece.encode()
            if len(data) > left:
                break
            file.write(data)
            left -= len(data)
        if header:
            file.seek(0)
            file.write((size - left).to_bytes(8, "little"))


def members(form: str) -> Iterator[str]:
    """Members of an object without end; `#` is a number that makes each different."""
    for i in range(1 << 30):
        yield form.replace("#", str(i)) + ","


def many(piece: str, count: int = 1 << 16) -> Iterator[str]:
    return repeat(piece * count)


NAMELESS = "Expecting property name enclosed in double quotes"
EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
ENTRY = "header entry is over the limit: expected at most 65536, found more"
MANY = "number of members in one object is over the limit: expected at most 400000, found more"
KEYS = "size of all keys of one object is over the limit: expected at most 32000000, found more"
METADATA = "header's __metadata__ is over the limit: expected at most 1000000, found more"
HEADERS: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "numbers": (lambda: chain(['{"a":['], many("0,")), f"a ({SHARD}): {ENTRY}"),
    "lists": (lambda: chain(['{"a":['], many("[],")), f"a ({SHARD}): {ENTRY}"),
    "objects": (lambda: chain(['{"a":['], many("{},")), f"a ({SHARD}): {ENTRY}"),
    "fields": (lambda: chain(['{"a":{'], members('"#":0')), f"a ({SHARD}): {ENTRY}"),
    "deep": (lambda: chain(['{"a":'], many("[")), f"{SHARD}: not valid JSON: nested too deeply"),
    "text": (lambda: chain(['{"a":"'], many("x")), f"a ({SHARD}): {ENTRY}"),
    "escapes": (lambda: chain(['{"a":"'], many("\\u0041")), f"a ({SHARD}): {ENTRY}"),
    "name": (lambda: chain(['{"'], many("x")), f"{SHARD}: a key is over the limit: expected at most 65536, found more"),
    "tensors": (lambda: chain("{", members(f'"#":{EMPTY}')), f"{SHARD}: {MANY}"),
    # One character beyond the basic plane makes every character of a string take four bytes.
    "wide-names": (lambda: chain("{", members(f'"#{"x" * 4000}\U0001f600":{EMPTY}')), f"{SHARD}: {KEYS}"),
    "shapes": (
        lambda: chain("{", members('"#":{"dtype":"U8","shape":[0,#],"data_offsets":[0,0]}')),
        f"{SHARD}: has too many different dtypes and shapes: expected at most 16384, found more",
    ),
    "metadata": (lambda: chain(['{"__metadata__":{'], members('"#":""')), f"{SHARD}: {METADATA}"),
    "metadata-text": (lambda: chain(['{"__metadata__":{"a":"'], many("x")), f"{SHARD}: {METADATA}"),
    "spaces": (lambda: chain("{", many(" ")), f"{SHARD}: not valid JSON: {NAMELESS} (char 99942401)"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return awq().write(tmp_path / "source")


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_100_mb_is_refused_in_little_memory(name: str, folder: Path) -> None:
    pieces, message = HEADERS[name]
    write(folder / SHARD, pieces(), MAX_HEADER, header=True)
    ran = run("plan", folder)
    assert (ran.code, ran.errors) == (3, [f"error: {message}"])
    assert ran.memory < MEMORY


INDEXES: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "tensors": (lambda: chain(['{"weight_map":{'], members('"#":"a.safetensors"')), f"{INDEX}: {MANY}"),
    "wide-names": (
        lambda: chain(['{"weight_map":{'], members(f'"#{"x" * 4000}\U0001f600":"a.safetensors"')),
        f"{INDEX}: {KEYS}",
    ),
    "keys": (lambda: chain("{", members('"#":0')), f"{INDEX}: {MANY}"),
    "numbers": (
        lambda: chain(['{"metadata":['], many("0,")),
        f"{INDEX}: the value of 'metadata' is over the limit: expected at most 65536, found more",
    ),
    "shard-text": (
        lambda: chain(['{"weight_map":{"a":"'], many("x")),
        f"a ({INDEX}): the name of a shard is over the limit: expected at most 65536, found more",
    ),
    "deep": (lambda: chain(['{"metadata":'], many("[")), f"{INDEX}: not valid JSON: nested too deeply"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_of_50_mb_is_refused_in_little_memory(name: str, folder: Path) -> None:
    pieces, message = INDEXES[name]
    write(folder / INDEX, pieces(), MAX_INDEX, header=False)
    ran = run("plan", folder)
    assert (ran.code, ran.errors) == (3, [f"error: {message}"])
    assert ran.memory < MEMORY


SMALL: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "numbers": (lambda: chain(['{"a":['], many("0,")), "has too many values: expected at most 500000, found "),
    "lists": (lambda: chain(['{"a":['], many("[],")), "has too many values: expected at most 500000, found "),
    "deep": (lambda: chain(['{"a":'], many("[", 300_000)), "has too many values: expected at most 500000, found "),
    "deep-but-short": (lambda: iter(['{"a":' + "[" * 400_000]), "not valid JSON: nested too deeply"),
    "101-deep": (lambda: iter(['{"a":' + "[" * 100 + "]" * 100 + "}"]), "not valid JSON: nested too deeply"),
    "text": (lambda: chain(['{"a":"'], many("x", 1 << 10)), "not valid JSON: Unterminated string"),
    "wide-text": (lambda: chain(['{"a":"\U0001f600'], many("x", 1 << 10)), "not valid JSON: Unterminated string"),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("file", ["config.json", "quant_config.json"])
def test_a_configuration_of_16_mb_is_refused_in_little_memory(name: str, file: str, folder: Path) -> None:
    pieces, message = SMALL[name]
    if file != "config.json":
        config = json.loads((folder / "config.json").read_bytes())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    write(folder / file, pieces(), MAX_JSON, header=False)
    ran = run("plan", folder)
    assert ran.code == 3
    assert [e[: len(f"error: {file}: {message}")] for e in ran.errors] == [f"error: {file}: {message}"]
    assert ran.memory < MEMORY


@pytest.mark.parametrize(("file", "limit"), [("config.json", MAX_JSON), (INDEX, MAX_INDEX)])
def test_a_file_over_its_limit_is_not_read(file: str, limit: int, folder: Path) -> None:
    (folder / file).touch()
    with (folder / file).open("r+b") as handle:
        handle.truncate(limit + 1)
    ran = run("plan", folder)
    found = f"error: {file}: is over the limit: expected at most {limit} bytes, found {limit + 1}"
    assert (ran.code, ran.errors) == (3, [found])
    assert ran.memory < MEMORY


@pytest.mark.parametrize("name", ["numbers", "lists", "wide-text"])
def test_a_manifest_of_16_mb_is_refused_in_little_memory(name: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(folder, "--out", out).code == 0
    pieces, message = SMALL[name]
    write(out / "sm70/manifest.json", pieces(), MAX_JSON, header=False)
    for code, args in ((6, ("verify", out)), (6, ("inspect", out)), (5, (folder, "--out", out))):
        ran = run(*args)
        assert ran.code == code
        assert ran.errors[0].startswith(f"error: sm70/manifest.json: {message}")
        assert ran.memory < MEMORY


@pytest.mark.parametrize("line", ["\n", "{}\n", '{"layer":0,"banks":[],"sources":[],"findings":[]}\n'])
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "after-a-good-head"])
def test_a_journal_of_16_mb_is_refused_in_little_memory(whole: bool, line: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(folder, "--out", out, "--layers", 0).code == 0
    journal = out / "sm70/journal-0.jsonl"
    head = journal.read_text().splitlines(keepends=True)[0]
    write(journal, chain([head] if whole else [], many(line, 100)), MAX_JSON, header=False)
    ran = run(folder, "--out", out)
    assert (ran.code, ran.errors) == (5, ["error: sm70/journal-0.jsonl: is damaged, or no journal of this tool"])
    assert ran.memory < MEMORY


def test_shards_that_hold_too_many_tensors_together_are_refused(folder: Path) -> None:
    for shard in ("a", "b"):
        entries = (f'"{shard}{i}":{EMPTY}' + ("}" if i == 199_999 else ",") for i in range(200_000))
        write(folder / f"{shard}.safetensors", chain("{", entries), MAX_HEADER, header=True)
    tensors = len(awq().tensors)
    message = f"its shards hold too many tensors: expected at most 400000, found {400_000 + tensors}"
    ran = run("plan", folder)
    assert (ran.code, ran.errors) == (3, [f"error: {folder}: {message}"])
    assert ran.memory < MEMORY


def test_48_layers_of_512_experts_are_opened_in_little_memory(folder: Path) -> None:
    """294,912 tensors in one shard with an index, the header in the order that costs most."""
    names = [
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight{part}"
        for layer in range(48)
        for expert in range(512)
        for projection in ("gate", "up", "down")
        for part in ("", "_scale", "_scale_2", "_packed")
    ]
    last = len(names) - 1
    entries = (
        f'"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{last - i},{last - i + 1}]}}'
        + ("}" if i == last else ",")
        for i, name in enumerate(names)
    )
    write(folder / SHARD, chain("{", entries), MAX_HEADER, header=True)
    with (folder / SHARD).open("ab") as file:
        file.truncate(file.tell() + len(names))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    script = f"""{PEAK}
from sm70_convert.checkpoint import open_checkpoint
with open_checkpoint(Path(sys.argv[1])) as checkpoint:
    print(len(checkpoint.refs), peak())
"""
    child = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=60)
    tensors, memory = map(int, child.stdout.split())
    assert tensors == len(names)
    assert memory << 10 < MEMORY


def header(text: str) -> str:
    """The message that a header of this text gets."""
    data = len(text.encode()).to_bytes(8, "little") + text.encode()
    with pytest.raises(CheckpointError) as caught:
        read_header(lambda at, count: data[at : at + count], len(data), "x")
    return str(caught.value)


# Around the ends of the pieces in which a document is read, 65,536 bytes each.
@pytest.mark.parametrize("spaces", [*range(65_400, 65_540), 131_000])
def test_a_document_is_the_same_wherever_its_pieces_end(spaces: int) -> None:
    pad = " " * spaces
    good = f'{{"__metadata__":{{"é\\u00e9\\n😀":"\\ud83d\\ude00"}},"ü😀":{EMPTY},"b":{EMPTY}{pad}}}'
    for text in (pad.join(("{", good[1:])), good):
        data = len(text.encode()).to_bytes(8, "little") + text.encode()
        read = read_header(lambda at, count, data=data: data[at : at + count], len(data), "x")
        assert read.metadata == {"éé\n😀": "😀"}
        assert list(read.tensors) == ["ü😀", "b"]
    assert header("{" + pad + '"a":{]') == (f"x: not valid JSON: {NAMELESS} (char {spaces + 6})")
    assert parse_index(f'{{"x":1,{pad}"weight_map":{{"a":{pad}"ü.safetensors"}}}}'.encode()) == {"ü.safetensors": ["a"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "Expecting value (char 5)"),
        ("tru", "Expecting value (char 5)"),
        ("-", "Expecting value (char 5)"),
        ('"', "Unterminated string starting at (char 5)"),
        ('"\\x"', "Invalid \\escape (char 6)"),
        ('"\\u12', "Invalid \\uXXXX escape (char 7)"),
        ("[1 2]", "Expecting ',' delimiter (char 8)"),
    ],
)
def test_what_is_invalid_is_said_with_its_place(value: str, message: str) -> None:
    assert header('{"a":' + value) == f"x: not valid JSON: {message}"


def test_the_largest_value_is_read_and_one_character_more_is_not() -> None:
    for size, fits in ((65_536, True), (65_537, False)):
        value = '"' + "x" * (size - 2) + '"'
        expected = "header entry is not exactly" if fits else "header entry is over the limit"
        assert expected in header(f'{{"a":{value}}}')
        assert expected in header(f'{{"a":{value}' + " " * 200_000 + "}")


def test_a_document_of_the_greatest_depth_is_read() -> None:
    data = b'{"a":' + b"[" * 99 + b"]" * 99 + b"}"
    assert load_object(data, "x")["a"]
