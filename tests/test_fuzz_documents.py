"""Documents changed in one to three places, through every command: refused or done, never a bug, never outside the folders."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from made import INDEX, awq, nvfp4
from sm70_convert.cli import main

FUZZED = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")),
    deadline=None,
    derandomize=True,  # the same in every run: `make fuzz` is for finding new inputs
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)

# Where a command may read and write, while one runs. An audit hook cannot be removed, so that it has a switch.
_allowed: list[str] | None = None
_code = [os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, Path(__file__).parent.parent, *sys.path) if p]
_outside: list[str] = []
_EVENTS = ("os.", "shutil.", "pathlib.", "glob.", "tempfile.")


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _allowed is None or not (event == "open" or event.startswith(_EVENTS)):
        return
    writes = event not in (
        "open",
        "os.listdir",
        "os.scandir",
        "os.walk",
        "pathlib.Path.glob",
        "glob.glob",
        "glob.glob/2",
    )
    if event == "open":
        writes = isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    for path in args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]:
        if isinstance(path, (str, bytes, os.PathLike)):
            # The link itself is what is written, renamed or removed; what lies behind one is what is read.
            given = os.fsdecode(path)
            real = os.path.join(os.path.realpath(os.path.dirname(given) or "."), os.path.basename(given))  # noqa: PTH118, PTH120, PTH119
            # A new folder's entry is made durable by an fsync of the folder that it lies in.
            synced = event == "open" and not writes and real in map(os.path.dirname, _allowed)
            if not synced and not _within(
                real, _allowed if writes else [*_allowed, *_code, "/proc", "/sys", "/dev", "/etc"]
            ):
                _outside.append(f"{event} {given}")


def _within(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


sys.addaudithook(_hook)


@contextmanager
def only_in(*folders: Path) -> Iterator[None]:
    """Fails if anything outside the folders is written, or read besides code."""
    global _allowed  # noqa: PLW0603 - the hook is global, too
    _outside.clear()
    _allowed = [os.path.realpath(f) for f in folders]
    try:
        yield
    finally:
        _allowed = None
    assert _outside == []


def run(*args: object, folders: tuple[Path, ...]) -> int:
    with only_in(*folders):
        result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code in (0, 3, 4, 5, 6), (args, result.stderr)
    assert result.exit_code == 0 or "error: " in result.stderr
    assert "Traceback" not in result.stderr
    return result.exit_code


def test_the_hook_sees_what_is_outside(tmp_path: Path) -> None:
    for act in (
        lambda: (tmp_path / "a").write_bytes(b""),
        lambda: os.open(tmp_path / "a", os.O_RDONLY),
        lambda: (tmp_path / "a").rename(tmp_path / "b"),
        (tmp_path / "c").mkdir,
        lambda: list(tmp_path.iterdir()),
        (tmp_path / "b").unlink,
    ):
        with pytest.raises(AssertionError), only_in(tmp_path / "inside"):
            act()
        with only_in(tmp_path):
            pass


# A document is changed at a place in it, or its text is.
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 7, 2**31, 2**60, 2**63, 10**30, 0.5, 1e400, float("nan"), "", "x", "0", "0-1",
    "0-99999999999", "9" * 5000, "../x", "/x", "..", "a/b", "a\0b", "a\nb", "\x1b[2J", "é\U0001f600", "x" * 300,
    "model.safetensors", "sm70/manifest.json", "blake3", "sha256", "awq", "modelopt", "NVFP4", "MIXED_PRECISION",
    "BF16", "U8", "awq-half2", "model.layers.0.mlp.experts.0",
    [], [0], [0, 0], [-1, 1], [[]], [None], ["x"], [2**62, 2**62], {}, {"x": 1}, {"": {}}, [[[[[[[[[[]]]]]]]]]],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from places(below, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(draw: st.DataObject, document: Any) -> Any:
    document = json.loads(json.dumps(document))
    for _ in range(draw.draw(st.integers(1, 3), label="changes")):
        every = list(places(document))[1:]
        if not every:
            break
        path = draw.draw(st.sampled_from(every), label="place")
        holder, key = at(document, path[:-1]), path[-1]
        kind = draw.draw(st.sampled_from(["odd", "odd", "remove", "copy", "nudge", "rename"]), label="kind")
        if kind == "remove":
            del holder[key]
        elif kind == "copy":
            holder[key] = json.loads(json.dumps(at(document, draw.draw(st.sampled_from(every), label="from"))))
        elif kind == "nudge" and type(holder[key]) is int:
            holder[key] += draw.draw(st.sampled_from([-1, 1, 8, -8, 64]), label="by")
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw.draw(st.sampled_from([str(o) for o in ODD if not isinstance(o, float)]))] = holder.pop(key)
        else:
            holder[key] = deepcopy(draw.draw(st.sampled_from(ODD), label="value"))
    return document


def text_of(draw: st.DataObject, document: Any) -> bytes:
    """The changed document's text, itself damaged now and then."""
    data = json.dumps(changed(draw, document)).encode()
    if draw.draw(st.integers(0, 9), label="damage") == 0:
        where = draw.draw(st.integers(0, len(data)), label="where")
        data = (
            data[:where]
            + draw.draw(st.sampled_from([b"", b"\0", b"\xff", b"{", b"]", b'"', b",", b"-", b"\\"]))
            + data[where + 1 :]
        )
    return data


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints, and folders prepared of them."""
    base = tmp_path_factory.mktemp("base")
    awq(experts=2, hidden=32, intermediate=32, layers=2, shards=2).write(base / "awq")
    nvfp4(experts=2, hidden=32, intermediate=32, shards=2).write(base / "nvfp4")
    for args in (
        (base / "awq", "--out", base / "sealed", "--tp-size", 1),
        (base / "awq", "--out", base / "parts", "--layers", 0),
        (base / "awq", "--out", base / "parts", "--layers", 1),
    ):
        assert run(*args, "--jobs", 1, folders=(base,)) == 0
    return base


@contextmanager
def copied(base: Path, *names: str) -> Iterator[tuple[Path, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            shutil.copytree(base / name, Path(folder) / name, symlinks=True)
        yield (Path(folder), *(Path(folder) / name for name in names))


def all_of(source: Path, out: Path, folders: tuple[Path, ...]) -> None:
    """Plans, describes and converts a checkpoint; what was sealed must verify, and nothing else may look sealed."""
    run("inspect", source, folders=folders)
    planned = run("plan", source, folders=folders)
    code = run(source, "--out", out, "--jobs", 1, folders=folders)
    assert code == 0 or planned in (0, code)
    assert (out / "sm70/manifest.json").exists() == (code == 0)
    if code == 0:
        assert run("verify", out, "--source", source, folders=folders) == 0


@pytest.mark.parametrize("name", ["awq", "nvfp4"])
@pytest.mark.parametrize("file", ["config.json", INDEX])
@FUZZED
@given(draw=st.data())
def test_a_changed_config_or_index(base: Path, file: str, name: str, draw: st.DataObject) -> None:
    with copied(base, name) as (root, source):
        (source / file).write_bytes(text_of(draw, json.loads((source / file).read_bytes())))
        all_of(source, root / "out", (source, root / "out"))


@pytest.mark.parametrize("name", ["awq", "nvfp4"])
@FUZZED
@given(draw=st.data())
def test_a_changed_header(base: Path, name: str, draw: st.DataObject) -> None:
    with copied(base, name) as (root, source):
        path = source / "model-00001-of-00002.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = text_of(draw, json.loads(data[8:end]))
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
        run("inspect", path, folders=(source,))
        all_of(source, root / "out", (source, root / "out"))


@FUZZED
@given(draw=st.data())
def test_a_changed_manifest(base: Path, draw: st.DataObject) -> None:
    with copied(base, "awq", "sealed") as (_, source, out):
        path = out / "sm70/manifest.json"
        document = json.loads(path.read_bytes())
        data = text_of(draw, document)
        try:  # with a digest that is right, or it would be refused for that alone
            document = json.loads(data)
            document.pop("manifest_digest", None)
            canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
            data = json.dumps({**document, "manifest_digest": blake3(canonical).hexdigest()}).encode()
        except ValueError:
            pass
        path.write_bytes(data)
        folders = (source, out)
        run("inspect", out, folders=folders)
        run("verify", out, "--quick", folders=folders)
        run("verify", out, "--source", source, folders=folders)
        run(source, "--out", out, "--jobs", 1, folders=folders)
        run(source, "--out", out, "--tp-size", 1, "--overwrite", "--jobs", 1, folders=folders)


@FUZZED
@given(draw=st.data())
def test_a_changed_journal(base: Path, draw: st.DataObject) -> None:
    with copied(base, "awq", "parts") as (_, source, out):
        path = draw.draw(st.sampled_from(sorted((out / "sm70").glob("journal*.jsonl"))), label="journal")
        lines = path.read_bytes().splitlines()
        which = draw.draw(st.integers(0, len(lines) - 1), label="line")
        lines[which] = text_of(draw, json.loads(lines[which]))
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        folders = (source, out)
        run("inspect", out, folders=folders)
        run("verify", out, folders=folders)
        sealed = run("seal", out, "--source", source, folders=folders)
        assert (out / "sm70/manifest.json").exists() == (sealed == 0)
        if sealed == 0:
            assert run("verify", out, "--source", source, folders=folders) == 0
        made = run(source, "--out", out, "--jobs", 1, folders=folders)
        if made == 0:
            assert run("verify", out, "--source", source, folders=folders) == 0
