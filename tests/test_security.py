"""What strangers may put into a checkpoint or a folder: never followed out of it, waited for, run, or shown as it is."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import CliRunner, Result

from bad_inputs import FIRST, SECOND, assert_nothing_sealed, contents, interrupted, seal
from made import INDEX, SINGLE, awq, edited
from sm70_convert.cli import main
from sm70_convert.errors import IntegrityError, Sm70Error
from sm70_convert.vllm_plugin.folder import PreparedFolder

BANK = "sm70/tp1/rank0/layer-00000.safetensors"
MANIFEST = "sm70/manifest.json"


class Hang(BaseException):
    """Nothing catches it."""


@pytest.fixture(autouse=True)
def fail_instead_of_hanging() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return awq(shards=2).write(tmp_path / "source")


@pytest.fixture
def sealed(source: Path, tmp_path: Path) -> Path:
    seal(source, tmp_path / "out")
    return tmp_path / "out"


def run(*args: object) -> Result:
    """Runs the tool in this process; never a traceback."""
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert ("Traceback" in result.stderr) == ("--debug" in args)
    return result


def first_error(result: Result) -> str:
    return next(line for line in result.stderr.splitlines() if line.startswith("error: ")).removeprefix("error: ")


# Names in an index.
@pytest.mark.parametrize(
    "name",
    ["other.safetensors/", "./other.safetensors", "a/../other.safetensors", "..", "/dev/zero", "a" * 236 + ".safetensors"],
)  # fmt: skip
def test_an_index_names_nothing_but_plain_files_of_its_folder(name: str, source: Path, tmp_path: Path) -> None:
    with edited(source / INDEX) as index:
        index["weight_map"]["model.norm.weight"] = name
    for args in ((source, "--out", tmp_path / "out"), ("plan", source), ("inspect", source)):
        result = run(*args)
        assert result.exit_code == 3
        assert first_error(result) == (
            f"model.norm.weight ({INDEX}): the index names a shard that is not a plain file name in this folder: "
            f"expected NAME.safetensors, found {repr(name)[:200]}"
        )
    assert not (tmp_path / "out").exists()


def test_an_index_with_an_endless_tensor_name_is_refused_in_a_short_line(source: Path, tmp_path: Path) -> None:
    with edited(source / INDEX) as index:
        index["weight_map"]["a" * 4097] = FIRST
    result = run(source, "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert first_error(result) == f"{INDEX}: names a tensor of 4097 characters, more than 4096"


# What lies where a file should be.
def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def dangling(path: Path) -> None:
    path.symlink_to("gone")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


STRANGE = {
    fifo: "is not a regular file",
    device: "is not a regular file",
    folder: "is not a regular file",
    unix_socket: "cannot be opened: No such device or address",
    dangling: "is missing",
    loop: "cannot be opened: Too many levels of symbolic links",
}
Place = Callable[[Path], None]


@pytest.mark.parametrize("file", [SECOND, "config.json", INDEX])
@pytest.mark.parametrize("make", STRANGE, ids=lambda make: make.__name__)
def test_what_is_no_file_in_a_checkpoint_is_refused_at_once(
    make: Place, file: str, source: Path, tmp_path: Path
) -> None:
    (source / file).unlink()
    make(source / file)
    for args in ((source, "--out", tmp_path / "out"), ("plan", source), ("inspect", source)):
        result = run(*args)
        assert result.exit_code == 3
        assert first_error(result) == f"{file}: {STRANGE[make]}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [fifo, device, unix_socket, dangling, loop], ids=lambda make: make.__name__)
@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_what_is_no_file_beside_the_shards_is_refused_at_once(
    make: Place, file: str, source: Path, tmp_path: Path
) -> None:
    (source / file).unlink(missing_ok=True)
    make(source / file)
    result = run(source, "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert first_error(result) == f"{file}: is no regular file, nor a link to one"


def test_symlinks_that_end_at_files_are_followed(source: Path, sealed: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in source.iterdir():
        (tmp_path / f"hop-{path.name}").symlink_to(path)
        (links / path.name).symlink_to(Path("..") / f"hop-{path.name}")
    seal(links, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(sealed)
    assert not any(path.is_symlink() for path in (tmp_path / "again").rglob("*"))


# A sealed folder from a stranger. Each way to open it, and the exit code of its refusal.
def opened_by_the_plugin(out: Path, _source: Path) -> str:
    with pytest.raises(IntegrityError) as caught:
        PreparedFolder.open(out)
    return str(caught.value)


def through(code: int, *args: str) -> Callable[[Path, Path], str]:
    def way(out: Path, source: Path) -> str:
        result = run(*(str(out) if a == "OUT" else str(source) if a == "SOURCE" else a for a in args))
        assert result.exit_code == code, result.output
        return first_error(result)

    return way


WAYS = {
    "verify": through(6, "verify", "OUT"),
    "quick": through(6, "verify", "OUT", "--quick"),
    "source": through(6, "verify", "OUT", "--source", "SOURCE"),
    "inspect": through(6, "inspect", "OUT"),
    "env": through(6, "env", "--check", "OUT"),
    "plugin": opened_by_the_plugin,
    "again": through(5, "SOURCE", "--out", "OUT"),
    "one-more": through(5, "SOURCE", "--out", "OUT", "--tp-size", "2"),
    "overwrite": through(5, "SOURCE", "--out", "OUT", "--overwrite"),
}


@pytest.fixture
def with_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """env --check looks at a folder where there is a runtime for it."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)


def with_manifest(out: Path, edit: Callable[[Any], object]) -> None:
    """Edits the manifest, and gives it the digest that is right for it."""
    path = out / MANIFEST
    document = json.loads(path.read_bytes())
    document.pop("manifest_digest")
    edit(document)
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(json.dumps({**document, "manifest_digest": blake3(data).hexdigest()}).encode())


def assert_refused_in_every_way(out: Path, source: Path, message: str) -> None:
    before = contents(out.parent)
    for name, way in WAYS.items():
        found = way(out, source)
        assert message in found, name
    assert contents(out.parent) == before


PATHS = ("../victim", "/etc/passwd", "a/../../victim", "a\0b", "a/", "", ".", "a//b", "sm70/../../victim", "x" * 256)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ascii(path)[:20])
@pytest.mark.parametrize("where", ["banks", "passthrough"])
def test_a_manifest_names_nothing_outside_its_folder(
    where: str, path: str, sealed: Path, source: Path, tmp_path: Path, with_runtime: None
) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    with_manifest(sealed, lambda m: m[where][0].update(path=path))
    message = f"although its digest is right: {path[:100]!r} is no plain relative path"
    assert_refused_in_every_way(sealed, source, message)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ascii(path)[:20])
def test_parts_are_not_sealed_over_such_a_manifest(path: str, sealed: Path, source: Path) -> None:
    assert run(source, "--out", sealed, "--tp-size", 2, "--layers", 0).exit_code == 0
    with_manifest(sealed, lambda m: m["passthrough"][0].update(path=path))
    before = contents(sealed)
    assert through(5, "seal", "OUT")(sealed, source).endswith(f"{path[:100]!r} is no plain relative path")
    assert contents(sealed) == before


UNSOUND: dict[str, Callable[[Any], object]] = {
    "bytes-negative": lambda m: m["banks"][0].update(bytes=-1),
    "bytes-text": lambda m: m["banks"][0].update(bytes="1"),
    "bytes-true": lambda m: m["passthrough"][0].update(bytes=True),
    "digest-null": lambda m: m["banks"][0].update(digest=None),
    "tensors-list": lambda m: m["banks"][0].update(tensors=[]),
    "tensor-digest": lambda m: m["banks"][0]["tensors"].update(w2_tm_weight=5),
    "path-number": lambda m: m["banks"][0].update(path=5),
    "field-too-many": lambda m: m["banks"][0].update(mode=511),
    "no-banks": lambda m: m.pop("banks"),
    "banks-object": lambda m: m.update(banks={"a": 1}),
    "tp-zero": lambda m: m.update(tp_sizes=[0]),
    "tp-huge": lambda m: m.update(tp_sizes=[10**9]),
    "tp-text": lambda m: m.update(tp_sizes=["1"]),
    "tp-none": lambda m: m.update(tp_sizes=[]),
    "tp-twice": lambda m: m.update(tp_sizes=[1, 1]),
    "tp-many": lambda m: m.update(tp_sizes=[1024] * 2000),
    "experts-zero": lambda m: m["moe"].update(experts=0),
    "experts-huge": lambda m: m["moe"].update(experts=10**30),
    "hidden-float": lambda m: m["moe"].update(hidden=64.0),
    "group-zero": lambda m: m["layout"].update(group_size=0),
    "layout-name": lambda m: m["layout"].update(name="../x"),
    "layout-null": lambda m: m.update(layout=None),
    "interleave-number": lambda m: m["layout"].update(interleave_gate_up=1),
    "layers-text": lambda m: m["moe"].update(layers="0-999999"),
    "layers-list": lambda m: m["moe"].update(layers=[0]),
    "source-list": lambda m: m.update(source=[]),
    "quantization-null": lambda m: m.update(quantization=None),
    "dropped-number": lambda m: m.update(dropped=[5]),
    "finding-count": lambda m: m.update(findings=[{"message": "", "example": "", "count": "1", "layer": None}]),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_manifest_that_makes_no_sense_is_refused_whatever_its_digest(
    name: str, sealed: Path, source: Path, with_runtime: None
) -> None:
    with_manifest(sealed, UNSOUND[name])
    assert_refused_in_every_way(sealed, source, "is none that this tool wrote, although its digest is right: ")


@pytest.mark.parametrize("hash_name", [None, 5, ["blake3"], "md5"], ids=str)
def test_a_manifest_without_a_hash_of_ours_is_refused(
    hash_name: object, sealed: Path, source: Path, with_runtime: None
) -> None:
    with_manifest(sealed, lambda m: m.update(hash=hash_name))
    assert_refused_in_every_way(sealed, source, "was altered or damaged: its own digest does not match")


@pytest.mark.parametrize("make", [fifo, device, folder], ids=lambda make: make.__name__)
def test_a_manifest_that_is_no_file_is_refused_at_once(
    make: Place, sealed: Path, source: Path, with_runtime: None
) -> None:
    (sealed / MANIFEST).unlink()
    make(sealed / MANIFEST)
    assert_refused_in_every_way(sealed, source, "sm70/manifest.json: is not a regular file")


@pytest.mark.parametrize("size", [None, 0], ids=["size-as-sealed", "size-0"])
@pytest.mark.parametrize("make", [fifo, device, folder], ids=lambda make: make.__name__)
def test_a_bank_that_is_no_file_is_refused_at_once(
    make: Place, size: int | None, sealed: Path, source: Path, with_runtime: None
) -> None:
    if size is not None:  # as stat has it of a FIFO
        with_manifest(sealed, lambda m: m["banks"][0].update(bytes=size))
    (sealed / BANK).unlink()
    make(sealed / BANK)
    for name, way in WAYS.items():
        if name == "plugin":
            prepared = PreparedFolder.open(sealed)
            assert prepared is not None
            with pytest.raises(
                IntegrityError, match=r"bank is not a regular file|bank has the wrong size|bank is missing"
            ):
                prepared.bank(0, 0, 1)
        elif name not in ("again", "one-more", "overwrite"):
            assert BANK in way(sealed, source)
    assert run(source, "--out", sealed).exit_code == 6
    assert run("inspect", sealed / BANK).exit_code == 3


@pytest.mark.parametrize("make", [fifo, device, folder], ids=lambda make: make.__name__)
def test_a_shard_or_index_that_is_no_file_stops_the_plugin_at_once(make: Place, sealed: Path) -> None:
    prepared = PreparedFolder.open(sealed)
    assert prepared is not None
    assert prepared.unlisted() == {"sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"}
    for name in (FIRST, INDEX):
        (sealed / name).unlink()
        make(sealed / name)
        with pytest.raises(Sm70Error, match=r"regular file"):
            prepared.unlisted()
        with pytest.raises(IntegrityError, match=r"model.*: is missing"):
            prepared.check_passthrough()


# Journals.
@pytest.mark.parametrize(
    "edit",
    [
        lambda j: j["plan"].update(hash="md5"),
        lambda j: j["plan"].pop("source"),
        lambda j: j["plan"].update(source="x"),
        lambda j: j["plan"]["layout"].pop("interleave_gate_up"),
        lambda j: j["plan"].update(tp_sizes=[10**9]),
        lambda j: j.update(layers=[0]),
        lambda j: j.update(outputs=["../victim"]),
        lambda j: j.update(outputs=["/etc/passwd"]),
        lambda j: j.update(plan=None),
    ],
)
def test_a_journal_that_makes_no_sense_is_refused(edit: Callable[[Any], object], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(source, "--out", out, "--layers", 0).exit_code == 0
    journal = out / "sm70" / "journal-0.jsonl"
    head, rest = journal.read_text().split("\n", 1)
    document = json.loads(head)
    edit(document)
    journal.write_text(f"{json.dumps(document)}\n{rest}")
    before = contents(tmp_path)
    for args in (("seal", out), (source, "--out", out), (source, "--out", out, "--overwrite")):
        result = run(*args)
        assert result.exit_code == 5
        assert "sm70/journal-0.jsonl: is damaged, or no journal of this tool" in first_error(result)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ascii(path)[:20])
def test_a_journal_names_no_bank_outside_its_folder(path: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(source, "--out", out, "--layers", 0).exit_code == 0
    journal = out / "sm70" / "journal-0.jsonl"
    head, line, _ = journal.read_text().split("\n")
    record = json.loads(line)
    record["banks"][0]["path"] = path
    journal.write_text(f"{head}\n{json.dumps(record)}\n")
    for args in (("seal", out), (source, "--out", out, "--overwrite")):
        assert run(*args).exit_code == 5
    assert_nothing_sealed(out)


# What is written.
LINKS: dict[str, Callable[[Path, Path], None]] = {
    "symlink": lambda path, victim: path.symlink_to(victim),
    "hard-link": lambda path, victim: path.hardlink_to(victim),
    "dangling": lambda path, victim: path.symlink_to(victim.with_name("not-there")),
    "fifo": lambda path, _: os.mkfifo(path),
}
FINAL = (BANK, "config.json", "tokenizer.json", INDEX, FIRST, "sm70-sentinel.safetensors", MANIFEST)


def temporary(path: str) -> str:
    head, _, name = path.rpartition("/")
    return f"{head}/.{name}.sm70-tmp".lstrip("/")


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("path", [*map(temporary, FINAL), *FINAL[:-1]])
def test_a_file_is_never_written_through_what_lies_in_its_place(
    path: str, kind: str, source: Path, sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, victim = tmp_path / "again", tmp_path / "victim"
    victim.write_bytes(b"mine")
    interrupted(source, out, monkeypatch)
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    LINKS[kind](out / path, victim)
    seal(source, out)
    assert victim.read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "out", "source", "victim"]
    assert contents(out) == contents(sealed)
    assert all(p.is_dir() or stat.S_ISREG(p.lstat().st_mode) for p in out.rglob("*"))


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("path", ["sm70/.folder.lock", "sm70/.journal.jsonl.lock", "sm70/journal.jsonl"])
def test_a_lock_or_journal_that_is_a_link_is_refused(
    path: str, kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_bytes(b"mine")
    interrupted(source, out, monkeypatch)
    (out / path).unlink(missing_ok=True)
    LINKS[kind](out / path, victim)
    result = run(source, "--out", out)
    assert result.exit_code == 5
    what = (
        "is damaged, or no journal of this tool"
        if "lock" not in path
        else "cannot be locked: it is no lock file of this tool"
    )
    assert first_error(result) == f"{path}: {what}"
    assert victim.read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "victim"]
    assert_nothing_sealed(out)


def test_a_sound_journal_elsewhere_is_not_appended_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    journal = interrupted(source, out, monkeypatch)
    journal.rename(elsewhere)
    journal.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert run(source, "--out", out).exit_code == 5
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("path", ["sm70", "sm70/tp1", "sm70/tp1/rank0"])
@pytest.mark.parametrize("args", [(), ("--overwrite",)], ids=["again", "overwrite"])
def test_no_folder_is_entered_through_a_symlink(args: tuple[str, ...], path: str, source: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    assert run(source, "--out", out, "--layers", 0).exit_code == 0
    (out / path).rename(elsewhere)
    (out / path).symlink_to(elsewhere)
    before = contents(elsewhere)
    result = run(source, "--out", out, *args)
    assert result.exit_code == 5
    assert path in first_error(result)
    if path != "sm70":
        assert run("seal", out).exit_code == 6
    assert contents(elsewhere) == before
    assert_nothing_sealed(out)


def test_overwrite_removes_nothing_behind_a_symlink(sealed: Path, source: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "victim").write_bytes(b"mine")
    (sealed / ".a.sm70-tmp").symlink_to(elsewhere)
    with_manifest(sealed, lambda m: m["passthrough"][0].update(path=".a.sm70-tmp/victim"))
    result = run(source, "--out", sealed, "--overwrite")
    assert result.exit_code == 5
    assert first_error(result) == ".a.sm70-tmp/victim: lies behind a symlink, so --overwrite does not remove it"
    assert contents(elsewhere) == {"victim": b"mine"}


def test_a_hard_link_that_a_killed_run_left_does_not_cost_the_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the link and its rename; then the same command without --passthrough hardlink."""
    before = contents(source)
    interrupted(source, tmp_path / "out", monkeypatch)
    for name in (FIRST, SECOND):
        (tmp_path / "out" / f".{name}.sm70-tmp").hardlink_to(source / name)
    seal(source, tmp_path / "out")
    assert contents(source) == before
    assert all((source / name).stat().st_nlink == 1 for name in (FIRST, SECOND))


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000], ids=oct)
def test_the_umask_decides_who_may_read(mask: int, source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").chmod(0o4755)  # what passes through is no exception
    before = os.umask(mask)
    try:
        seal(source, tmp_path / "out", "--hash", "sha256")
    finally:
        os.umask(before)
    modes = {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
    assert modes == {(True, 0o777 & ~mask), (False, 0o666 & ~mask)}


@pytest.mark.parametrize("name", ["sm70-sentinel.safetensors", "SHA256SUMS"])
def test_a_source_file_named_like_one_of_ours_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    if name.endswith(".safetensors"):
        (source / SECOND).rename(source / name)
        with edited(source / INDEX) as index:
            index["weight_map"] = {t: f.replace(SECOND, name) for t, f in index["weight_map"].items()}
    else:
        (source / name).touch()
    result = run(source, "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert first_error(result) == f"{name}: has a name that prepared folders use for themselves"


# What is handed on.
class Booby:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trap),)


def test_files_of_the_checkpoint_are_copied_as_bytes_and_never_run_or_parsed(source: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    code = f"import os; os.mkdir({str(trap)!r})\n".encode()
    handed_on = {
        "modeling_x.py": code,
        "sm70_convert.py": code,
        "sitecustomize.py": code,
        "pkg/__init__.py": code,
        "recipe.yaml": f"a: !!python/object/apply:os.mkdir ['{trap}']\n".encode(),
        "tokenizer.json": b"\xff{not json",
        "generation_config.json": b'{"a": NaN, "a": 2}',
        "tokens.txt": b"\0" * 5000,
    }
    left_out = {
        name: pickle.dumps(Booby(trap)) for name in ("pytorch_model.bin", "a.pkl", "x.pt", "y.pickle", ".hidden")
    }
    for name, data in (handed_on | left_out).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    with edited(source / "config.json") as config:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.Model"}
    out = tmp_path / "out"
    seal(source, out)
    for args in (("verify", out, "--source", source), ("inspect", out), ("inspect", source), ("plan", source)):
        assert run(*args).exit_code == 0
    found = contents(out)
    assert handed_on.items() <= found.items()
    assert not left_out.keys() & found.keys()
    assert not trap.exists()


# What is shown.
NASTY = "\x1b[31m\r\x07\x08\x9b\u202e\u2066\u200f\n"


def assert_harmless(*results: Result) -> None:
    for result in results:
        shown = result.stdout + result.stderr
        assert shown
        bad = {c for c in shown if not c.isprintable() and c != "\n"}
        assert bad == set()
        assert "\\x1b[31m\\r\\x07" in shown


def test_no_command_shows_a_name_that_steers_a_terminal(source: Path, tmp_path: Path, with_runtime: None) -> None:
    side = f"side{NASTY}.txt"
    (source / side).write_bytes(b"")
    source = source.rename(tmp_path / f"source{NASTY}")
    out = tmp_path / f"out{NASTY}"
    (source / f"more{NASTY}.safetensors").write_bytes((source / FIRST).read_bytes())  # a finding
    assert_harmless(run("plan", source), run("inspect", source), run(source, "--out", out, "--dry-run"))
    assert_harmless(run(source, "--out", out, "--layers", 0), run("seal", out))
    assert_harmless(run("verify", out), run("inspect", out), run("env", "--check", out), run(source, "--out", out))
    (out / side).unlink()
    assert_harmless(run("verify", out), run("verify", out, "--debug"), run("env", "--check", out))
    assert_harmless(run(source, "--out", out), run("verify", out, "--against", source), run("seal", out))
    as_json = run("verify", out, "--json")
    assert side in json.loads(as_json.stdout)["error"]["problems"][0]["file"]
    assert as_json.stdout.isascii()


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.update(num_experts_per_tok=NASTY),
        lambda c: c["quantization_config"].update(quant_method=NASTY),
        lambda c: c["quantization_config"].update(version=NASTY),
        lambda c: c["quantization_config"].update(bits=NASTY),
        lambda c: c["quantization_config"].update(modules_to_not_convert=NASTY),
        lambda c: c.update({"num_local_experts": NASTY}),
    ],
)
def test_no_value_of_a_config_steers_a_terminal(edit: Callable[[Any], object], source: Path, tmp_path: Path) -> None:
    with edited(source / "config.json") as config:
        edit(config)
    result = run(source, "--out", tmp_path / "out")
    assert result.exit_code in (3, 4)
    assert {c for c in result.stderr if not c.isprintable()} == {"\n"}
    assert len(result.stderr) < 500


# Headers that lie: all of them in test_safetensors_header.py; here, that the command line refuses them by name.
@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [1 << 63]},
        {"shape": [1 << 32, 1 << 32]},
        {"shape": [-64]},
        {"shape": [64.0]},
        {"shape": [True]},
        {"data_offsets": [0, 1 << 63]},
        {"data_offsets": [-128, 0]},
        {"dtype": "PICKLE"},
    ],
    ids=json.dumps,
)
def test_a_header_that_lies_is_refused_by_name(fields: dict[str, Any], tmp_path: Path) -> None:
    source = awq().write(tmp_path / "source")
    data = (source / SINGLE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["model.norm.weight"].update(fields)
    text = json.dumps(header).encode()
    (source / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    result = run(source, "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert first_error(result).startswith(f"model.norm.weight ({SINGLE}): ")
    assert not (tmp_path / "out").exists()


def test_a_model_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for model in ("a" * 5000, "a\0b"):
        result = run("plan", model)
        assert result.exit_code == 3
        assert first_error(result).endswith(": is no folder, and no hub id such as org/name")
    assert run("inspect", tmp_path / ("a" * 300)).exit_code in (3, 5)
