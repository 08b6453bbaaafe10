"""What the fuzzer calls: the readers of headers, indexes and other documents, each held against a second reader.

fuzz.py runs it under a coverage-guided fuzzer; test_fuzz_corpus.py replays the corpus without one.
"""

from __future__ import annotations

import json

from safetensors import SafetensorError, deserialize

from sm70_convert.checkpoint import parse_index
from sm70_convert.errors import CheckpointError
from sm70_convert.safetensors_header import read_header
from sm70_convert.strict_json import load_object


def read_shard(data: bytes) -> str:
    """The whole input is a file. What the safetensors library refuses, we refuse; what we read, it reads the same way."""
    try:
        header = read_header(lambda at, count: data[at : at + count], len(data), "x.safetensors")
    except CheckpointError as exc:
        return exc.problems[0].message
    try:
        library = {name: (f["dtype"], tuple(f["shape"]), len(f["data"])) for name, f in deserialize(data)}
    except SafetensorError as exc:
        raise AssertionError("the library refuses what we read") from exc
    assert library == {name: (e.dtype, e.shape, e.nbytes) for name, e in header.tensors.items()}
    return "read"


def read_one_header(data: bytes) -> str:
    """The input is the text of a header, of a file with no data."""
    return read_shard(len(data).to_bytes(8, "little") + data)


def read_index(data: bytes) -> str:
    """The input is an index. What we read, the json module reads the same way."""
    try:
        listed = parse_index(data)
    except CheckpointError as exc:
        return exc.problems[0].message
    weight_map = json.loads(data)["weight_map"]
    assert {tensor: file for file, tensors in listed.items() for tensor in tensors} == weight_map
    assert not any("/" in file or file.startswith(".") for file in listed)
    return "read"


def read_document(data: bytes) -> str:
    """The input is a configuration, a manifest or a journal's line."""
    try:
        document = load_object(data, "x.json")
    except CheckpointError as exc:
        return exc.problems[0].message
    # Not compared where there may be a NaN, which equals nothing.
    assert b"N" in data or document == json.loads(data)
    json.dumps(document, ensure_ascii=False, indent=2).encode()  # as it may be written again
    return "read"


READERS = (read_shard, read_one_header, read_index, read_document)


def target(data: bytes) -> str:
    """The first byte chooses the reader, the rest is its input. Gives the message, or "read"."""
    return READERS[data[0] % len(READERS)](data[1:]) if data else ""
