"""The command line: documents against their schemas, exit codes, streams, resuming, parts, and the same bytes every time."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

import sm70_convert.convert
from sm70_convert.bank import BankWriter
from sm70_convert.cli import main
from sm70_convert.console import Console
from sm70_convert.devices import CudaDevice
from sm70_convert.safetensors_header import build_header
from synthetic import Synthetic, tensors, write_checkpoint

DATA = Path(__file__).parent / "data"
SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"
AWQ = DATA / "autoawq-gemm-g64-qwen3moe"  # one MoE layer, and nothing to warn about
SHARDED = DATA / "modelopt-nvfp4-qwen3moe-sharded"  # MoE layers 1 and 2; its first and last shards hold no expert
PROGRAM = (sys.executable, "-m", "sm70_convert.cli")
COMMANDS = ("convert", "plan", "verify", "inspect", "seal", "env", "error")


def run(*args: object, code: int = 0, color: bool = False) -> Result:
    """Runs the tool in this process; it must end with `code`."""
    result = CliRunner().invoke(main, [str(a) for a in args], color=color)
    assert result.exit_code == code, (args, result.exit_code, result.output, result.exception)
    return result


def document(*args: object, code: int = 0) -> Any:
    """What the tool prints on stdout with --json."""
    return json.loads(run(*args, "--json", code=code).stdout)


def problems(*args: object, code: int) -> list[dict[str, Any]]:
    """The problems of a command that fails."""
    found: list[dict[str, Any]] = document(*args, code=code)["error"]["problems"]
    return found


def start(*args: object, **options: Any) -> subprocess.Popen[str]:
    """Runs the tool in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*PROGRAM, *map(str, args)], **(pipes | options))


def contents(folder: Path) -> dict[str, str]:
    """Every file below `folder`, hidden ones too, with a digest of its bytes."""
    paths = [p for p in sorted(folder.rglob("*")) if not p.is_dir()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and mtime of every file."""
    return {p.as_posix(): (s.st_ino, s.st_mtime_ns) for p in folder.rglob("*") if p.is_file() for s in (p.stat(),)}


def flip(path: Path, offset: int = -1) -> None:
    """Changes one byte and keeps the mtime."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def schema(command: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((SCHEMAS / f"{command}.schema.json").read_text())
    return value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four AWQ layers in three shards. Read only."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_checkpoint(folder, Synthetic("awq", 4, 4, 128, 256, group_size=32, shards=3, vocab=64))
    return folder


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """The same with the same mtimes, to be changed."""
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a plain run makes of `model` at TP 2."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(model, "--out", out, "--tp-size", 2)
    return contents(out)


# Documents and schemas

DOCUMENTS = (
    "convert sealed",
    "convert added",
    "convert complete",
    "convert part",
    "plan",
    "plan dry run",
    "plan size and scales",
    "verify quick",
    "verify digests",
    "verify source",
    "inspect checkpoint",
    "inspect prepared",
    "inspect prepared unsharded",
    "inspect file",
    "inspect bank",
    "seal",
    "env",
    "env with device and runtime",
    "error bug",
    "error usage",
    "error checkpoint",
    "error unsupported",
    "error output",
    "error integrity",
    "error device",
    "error interrupted",
    "error terminated",
)
# Objects whose keys are data, so that any may go; as may all but the message of a problem, and the index of a source.
OPEN = ("asked", "runtime_flags", "bank_bytes", "metadata", "tensors", "distributions")
EXIT_CODES = {
    "bug": 1,
    "usage": 2,
    "checkpoint": 3,
    "unsupported": 4,
    "output": 5,
    "integrity": 6,
    "device": 7,
    "interrupted": 130,
    "terminated": 143,
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A document of every command and outcome."""
    tmp = tmp_path_factory.mktemp("documents")
    nvfp4, out, parts = tmp / "nvfp4", tmp / "out", tmp / "parts"
    # Unlike global scales give a finding of a layer, the stray file one of the checkpoint.
    write_checkpoint(nvfp4, Synthetic("nvfp4", 2, 4, 128, 256, shards=3, vocab=64))
    shutil.copy(nvfp4 / "model-00001-of-00003.safetensors", nvfp4 / "stray.safetensors")
    made = {
        "convert sealed": document(nvfp4, "--out", out),
        "convert added": document(nvfp4, "--out", out, "--tp-size", 2),
        "convert complete": document(nvfp4, "--out", out, "--tp-size", 1, "--tp-size", 2),
        "convert part": document(AWQ, "--out", parts, "--layers", 0),
        "seal": document("seal", parts),
        "plan": document("plan", nvfp4),
        "plan dry run": document(nvfp4, "--out", tmp / "dry", "--dry-run"),
        "plan size and scales": document("plan", nvfp4, "--tp-size", 2, "--scales"),
        "verify quick": document("verify", out, "--quick"),
        "verify digests": document("verify", out),
        "verify source": document("verify", out, "--source", nvfp4),
        "inspect checkpoint": document("inspect", nvfp4),
        "inspect prepared": document("inspect", out),
        "inspect prepared unsharded": document("inspect", parts),
        "inspect file": document("inspect", nvfp4 / "model-00001-of-00003.safetensors"),
        "inspect bank": document("inspect", out / "sm70/tp2/rank1/layer-00001.safetensors"),
        "env": document("env"),
        "error usage": document("plan", AWQ, "--layers", 9, code=2),
        "error checkpoint": document("plan", tmp / "nothing", code=3),
        "error unsupported": document("plan", AWQ, "--tp-size", 16, code=4),
        "error output": document(AWQ, "--out", AWQ / "out", code=5),
        "error device": document(AWQ, "--out", tmp / "gpu", "--device", "cuda", code=7),
    }
    with pytest.MonkeyPatch.context() as patch:
        package = tmp / "site" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "_sm70_ops.py").touch()
        patch.syspath_prepend(package.parent)
        for module in ("environment", "kernel_choice"):
            patch.setattr(f"sm70_convert.{module}.cuda_devices", lambda: [CudaDevice("Tesla V100", (7, 0))])
        made["env with device and runtime"] = document("env")

    def fails(what: str) -> Any:
        def call(*_: object) -> None:
            if what == "bug":
                raise RuntimeError("a bug")
            os.kill(os.getpid(), signal.SIGINT if what == "interrupted" else signal.SIGTERM)

        return call

    for kind in ("bug", "interrupted", "terminated"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sm70_convert.describe.describe_path", fails(kind))
            made[f"error {kind}"] = document("inspect", out, code=EXIT_CODES[kind])
    flip(out / "sm70/tp2/rank1/layer-00001.safetensors")
    made["error integrity"] = document("verify", out, code=6)
    return made


def mutations(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Where to take a key out, put a key in, or change a type."""
    if path:
        yield path, "type"
    if isinstance(value, dict):
        yield path, "add"
        optional = path[-1:] and (path[-1] in OPEN or "problems" in path)
        for key in value:
            if key != "index" and (not optional or key == "message"):
                yield (*path, key), "remove"
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from mutations(child, (*path, key))


def mutated(value: Any, path: tuple[str | int, ...], how: str) -> Any:
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    if how == "add":
        (at[path[-1]] if path else at)["unexpected"] = {"unexpected": 0}
    elif how == "remove":
        del at[path[-1]]
    else:
        at[path[-1]] = {"unexpected": 0}
    return value


@pytest.mark.parametrize("command", COMMANDS)
def test_every_schema_is_one_and_of_the_2020_draft(command: str) -> None:
    assert schema(command)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema(command))


def test_there_is_a_schema_for_every_command() -> None:
    assert sorted(p.name for p in SCHEMAS.iterdir()) == sorted(f"{c}.schema.json" for c in COMMANDS)
    assert set(main.commands) == set(COMMANDS) - {"error"}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_json_document_fits_its_schema_and_a_changed_one_does_not(documents: dict[str, Any], what: str) -> None:
    validator = Draft202012Validator(schema(what.split()[0]))
    assert [e.message for e in validator.iter_errors(documents[what])] == []
    tried = list(mutations(documents[what]))
    assert {how for _, how in tried} == {"type", "add", "remove"}
    passed = [(path, how) for path, how in tried if validator.is_valid(mutated(documents[what], path, how))]
    assert passed == []


def test_the_documents_say_what_happened(documents: dict[str, Any]) -> None:
    statuses = ("sealed", "added", "complete", "part")
    assert [documents[f"convert {s}"]["status"] for s in statuses] == list(statuses)
    assert [documents[f"verify {k}"]["checked"] for k in ("quick", "digests", "source")] == [
        "quick",
        "digests",
        "source",
    ]
    assert documents["plan dry run"]["out"] is not None
    assert documents["plan"]["out"] is None
    assert {f["layer"] for f in documents["convert sealed"]["findings"]} == {None, 0, 1}
    assert documents["convert sealed"]["warnings"]
    # An expert has three projections of three banked tensors, and an input_scale each.
    assert documents["inspect checkpoint"]["tensors"] == {"total": 117, "banked": 72, "dropped": 24}
    assert documents["convert added"]["tp_sizes"] == [1, 2]
    assert documents["inspect prepared"]["source"].keys() == {"config", "index"}
    assert documents["inspect prepared unsharded"]["source"].keys() == {"config"}
    assert documents["env with device and runtime"]["devices"] == [{"name": "Tesla V100", "capability": [7, 0]}]
    assert documents["env with device and runtime"]["runtime"]["kind"] == "1cat"


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_an_error_document_holds_its_kind_and_exit_code(documents: dict[str, Any], kind: str) -> None:
    error = documents[f"error {kind}"]["error"]
    assert (error["kind"], error["exit_code"]) == (kind, EXIT_CODES[kind])
    for code in set(EXIT_CODES.values()) - {EXIT_CODES[kind]}:
        assert not Draft202012Validator(schema("error")).is_valid({"error": {**error, "exit_code": code}})


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_every_error_names_a_next_step(documents: dict[str, Any], kind: str) -> None:
    assert all(problem.get("hint") for problem in documents[f"error {kind}"]["error"]["problems"])


# Start-up

HEAVY = ("torch", "vllm", "numpy")


def imported(*args: object, watched: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the watched modules a command has imported by its end."""
    script = (
        "import sys\nfrom sm70_convert.cli import main\n"
        "try:\n    main(sys.argv[2:])\nexcept SystemExit as exit:\n    assert exit.code in (0, None), exit.code\n"
        "print([m for m in sys.argv[1].split(',') if m in sys.modules], file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, ",".join(watched), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stderr.splitlines()[-1].replace("'", '"'))
    return found


def test_help_is_quick() -> None:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([*PROGRAM, "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.3


@pytest.mark.parametrize("command", [(), ("convert",), ("plan",), ("verify",), ("seal",), ("env",)])
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    assert imported(*command, "--help") == []


def test_no_command_on_the_cpu_imports_torch_but_the_one_that_needs_the_reference(tmp_path: Path) -> None:
    out, watched = tmp_path / "out", ("torch", "vllm")
    assert imported(AWQ, "--out", out, "--device", "cpu", watched=watched) == []
    assert (
        imported(AWQ, "--out", tmp_path / "auto", "--device", "auto", watched=watched) == []
    )  # there is no driver here
    assert imported("plan", AWQ, "--tp-size", 2, "--scales", watched=watched) == []
    assert imported("inspect", out, watched=watched) == []
    assert imported("verify", out, watched=watched) == []
    assert imported("env", watched=watched) == []
    assert imported("verify", out, "--source", AWQ, watched=watched) == ["torch"]


def test_help_names_every_command_option_and_exit_code() -> None:
    text = " ".join(run("--help").stdout.split())
    for word in (*main.commands, "--tp-size", "--layout", "--passthrough", "--dry-run", "--json", "--debug"):
        assert word in text
    assert (
        "Exit codes: 0 done, 1 bug, 2 usage, 3 checkpoint wrong or incomplete, 4 valid but not supported, 5 output, "
        "6 integrity, 7 device, 130 interrupted, 143 terminated." in text
    )


# Usage

USAGE = [
    (("MODEL", "--out", "OUT", "--bogus"), "No such option '--bogus'"),
    (("MODEL",), "Missing option '--out'"),
    (("MODEL", "--out", "OUT", "--tp-size", "0"), "0 is not in the range 1<=x<=1024"),
    (("MODEL", "--out", "OUT", "--layers", "a"), "'a' is not a list of numbers and ranges such as 0-3,7"),
    (("MODEL", "--out", "OUT", "--layers", "3-1"), "'3-1' runs backwards"),
    (("MODEL", "--out", "OUT", "--layers", "0,3-5"), "--layers names 4-5, but the MoE layers are 0-3"),
    (("MODEL", "--out", "OUT", "--layout", "nvfp4-fp16"), "--layout nvfp4-fp16 is not for awq experts"),
    (("MODEL", "--out", "OUT", "--layout", "awq"), "'awq' is not one of 'auto', 'awq-half2'"),
    (("MODEL", "--out", "OUT", "--device", "gpu"), "--device 'gpu' is not auto, cpu, cuda or cuda:NUMBER"),
    (("MODEL", "--out", "OUT", "--revision", "main"), "--revision is for hub ids, but this is a local path"),
    (("verify", "SEALED", "--sample", "1"), "--sample and --revision go with --source"),
    (("verify", "SEALED", "--quick", "--source", "MODEL"), "--quick and --source exclude each other"),
    (("verify", "SEALED", "--rank", "1"), "--rank 1: this folder has TP sizes 1"),
]


@pytest.mark.parametrize(("args", "message"), USAGE, ids=[" ".join(a) for a, _ in USAGE])
def test_wrong_usage_is_2_and_makes_nothing(model: Path, tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    if "SEALED" in args:
        run(AWQ, "--out", tmp_path / "sealed")
    places = {"MODEL": model, "OUT": tmp_path / "out", "SEALED": tmp_path / "sealed"}
    result = run(*(places.get(a, a) for a in args), code=2)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_tp_sizes_that_want_different_layouts_are_2(tmp_path: Path) -> None:
    # Qwen3.8-Flash-Next: ReVolta wants compact AWQ scales at TP 4 only. The headers decide, so the data may be a hole.
    shape = Synthetic("awq", 1, 512, 2560, 640, group_size=32, shards=1, top_k=10, vocab=64)
    source = tmp_path / "model"
    write_checkpoint(source, Synthetic("awq", 1, 1, 128, 256, group_size=32, shards=1, vocab=64))
    config = json.loads((source / "config.json").read_text())
    config |= {"num_experts": 512, "hidden_size": 2560, "moe_intermediate_size": 640, "num_experts_per_tok": 10}
    (source / "config.json").write_text(json.dumps(config))
    header = build_header([tuple(t) for t in tensors(shape)], {"format": "pt"})
    with open(source / "model.safetensors", "wb") as file:
        file.write(header.raw)
        file.truncate(header.data_start + sum(t.nbytes for t in tensors(shape)))
    args = (source, "--out", tmp_path / "out", "--dry-run", "--tp-size", 2, "--tp-size", 4)
    (problem,) = problems(*args, code=2)
    assert problem["message"] == (
        "these TP sizes want different layouts, and a folder holds one "
        "(TP 2: awq-half2, interleave on; TP 4: awq-compact, interleave on)"
    )
    assert problem["hint"] == "use one --out for each, or choose with --layout and --interleave"
    assert document("plan", source, "--tp-size", 4)["layout"]["name"] == "awq-compact"
    assert document("plan", *args[:1], *args[4:], "--layout", "awq-half2")["tp_sizes"] == [2, 4]


# Exit codes 3 to 7, and 1


def test_a_checkpoint_that_is_not_there_is_3(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing", "--out", tmp_path / "out", code=3)
    assert result.stderr.startswith(f"error: {tmp_path / 'nothing'}: is no folder, and no hub id such as org/name\n")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_and_a_truncated_one_are_3_and_both_reported(own_model: Path, tmp_path: Path) -> None:
    (own_model / "model-00001-of-00003.safetensors").unlink()
    truncated = own_model / "model-00003-of-00003.safetensors"
    os.truncate(truncated, truncated.stat().st_size - 1)
    missing, short = problems(own_model, "--out", tmp_path / "out", code=3)
    assert (missing["file"], missing["message"]) == ("model-00001-of-00003.safetensors", "is missing")
    assert (short["file"], short["message"]) == ("model-00003-of-00003.safetensors", "is truncated")
    assert int(short["expected"].split()[0]) == int(short["actual"]) + 1
    assert not (tmp_path / "out").exists()


def test_a_tp_size_that_does_not_divide_is_4_and_names_those_that_work(tmp_path: Path) -> None:
    (problem,) = problems(AWQ, "--out", tmp_path / "out", "--tp-size", 4, code=4)
    assert problem["message"] == (
        "TP size 4 is not possible: each rank would hold 32 of the 128 intermediate channels, "
        "not a multiple of the group size 64"
    )
    assert problem["hint"] == "TP sizes that work for this checkpoint: 1, 2"
    assert not (tmp_path / "out").exists()


def test_a_prepared_folder_as_a_checkpoint_is_4(tmp_path: Path) -> None:
    run(AWQ, "--out", tmp_path / "out")
    (problem,) = problems(tmp_path / "out", "--out", tmp_path / "again", code=4)
    assert problem["message"] == "is a prepared folder already"


def test_an_output_that_overlaps_is_not_ours_or_has_another_plan_is_5(own_model: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    run(own_model, "--out", tmp_path / "out", "--layers", 0)
    for out, message in (
        (own_model, "output and checkpoint overlap"),
        (own_model / "out", "output and checkpoint overlap"),
        (tmp_path, "output and checkpoint overlap"),
        (tmp_path / "full", "is not empty, and holds no manifest or journal of this tool"),
    ):
        (problem,) = problems(own_model, "--out", out, code=5)
        assert problem["message"] == message
    (problem,) = problems(own_model, "--out", tmp_path / "out", "--interleave", "off", code=5)
    assert problem["message"] == "belongs to another plan: layout.interleave_gate_up differs"
    assert (problem["file"], problem["expected"], problem["actual"]) == ("sm70/journal-0.jsonl", "True", "False")
    assert contents(tmp_path / "full") == {"notes.txt": hashlib.sha256(b"mine").hexdigest()}


def test_a_changed_byte_of_a_bank_is_6_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(AWQ, "--out", out, "--tp-size", 2)
    bank = "sm70/tp2/rank1/layer-00000.safetensors"
    flip(out / bank)
    (problem,) = problems("verify", out, code=6)
    assert (problem["file"], problem["tensor"]) == (bank, "w2_tm_weight")
    assert document("verify", out, "--quick")["checked"] == "quick"
    (out / bank).unlink()
    (problem,) = problems("verify", out, "--quick", code=6)
    assert (problem["file"], problem["message"]) == (bank, "is missing or cannot be read: No such file or directory")


def test_what_nobody_expected_is_1_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: Path) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr("sm70_convert.describe.describe_path", broken)
    assert run("inspect", AWQ, code=1).stderr == (
        "error: unexpected RuntimeError: it broke\nnext: run again with --debug and report what it prints\n"
    )


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*PROGRAM, "inspect", AWQ], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


# The default command and the global flags


def test_the_default_command_is_convert_wherever_the_options_stand(model: Path, tmp_path: Path) -> None:
    for i, args in enumerate(
        (
            (model, "--out", "OUT"),
            ("convert", model, "--out", "OUT"),
            ("--out", "OUT", model),
            ("--tp-size", "1", model, "--out", "OUT"),
            ("-q", "--out", "OUT", "--tp-size", "1", model),
        )
    ):
        out = tmp_path / str(i)
        run(*(out if a == "OUT" else a for a in args))
        assert contents(out) == contents(tmp_path / "0")


@pytest.mark.parametrize(
    "args",
    [
        ("--json", "inspect", AWQ),
        ("inspect", "--json", AWQ),
        ("inspect", AWQ, "--json"),
        ("--no-color", "--json", "-q", "inspect", AWQ),
        ("-q", "inspect", "--no-color", AWQ, "--json"),
        ("-qv", "--json", "inspect", AWQ),
    ],
)
def test_global_flags_go_before_and_after_the_command(args: tuple[object, ...]) -> None:
    assert json.loads(run(*args).stdout)["kind"] == "checkpoint"


def test_quiet_says_nothing_when_all_is_well(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for args in (
        ("-q", SHARDED, "--out", out),
        (SHARDED, "--out", out, "--tp-size", 2, "-q"),
        ("verify", out, "-q"),
        (SHARDED, "--out", tmp_path / "part", "--layers", "1-2", "--quiet"),
        ("seal", tmp_path / "part", "--quiet"),
    ):
        result = run(*args)
        assert (result.stdout, result.stderr) == ("", "")
    assert run("inspect", out, "-q").stdout != ""  # what was asked for is no chatter
    result = run("-q", SHARDED, "--out", SHARDED / "out", code=5)
    assert result.stderr.startswith("error: ")


def test_data_goes_to_stdout_and_the_rest_to_stderr(tmp_path: Path) -> None:
    result = run(SHARDED, "--out", tmp_path / "out", "--json")
    assert json.loads(result.stdout)["warnings"] == [result.stderr.removeprefix("warning: ").rstrip("\n")]
    result = run(SHARDED, "--out", tmp_path / "verbose", "-v")
    assert {"layer 1 done", "layer 2 done"} < set(result.stderr.splitlines())
    assert result.stdout.startswith(f"sealed    {tmp_path / 'verbose'}\n")
    result = run("inspect", tmp_path / "nothing", code=3)
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == f"error: {tmp_path / 'nothing'}: is neither a folder nor a file"


def test_the_bytes_and_the_next_command_are_printed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = document(AWQ, "--out", out, "--tp-size", 2)
    assert done["bytes_written"] == sum(
        p.stat().st_size for p in out.rglob("*") if p.name != "manifest.json" and p.is_file()
    )
    assert done["next"] == [
        f"sm70-convert verify {out}",
        f"vllm serve {out} --load-format sm70_prepared --tensor-parallel-size 2",
    ]
    assert document(AWQ, "--out", tmp_path / "part", "--layers", 0)["next"] == [
        f"sm70-convert seal {tmp_path / 'part'}"
    ]


def on_a_terminal(*args: object, **environment: str) -> tuple[int, bytes]:
    """Runs the tool with stdout and stderr on a terminal; its exit code and all that it wrote there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | environment
    process = start(*args, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # Linux says EIO at the end
        while data := os.read(master, 65536):
            seen += data
    os.close(master)
    return process.wait(60), seen


def test_colours_are_for_terminals_and_can_be_turned_off(tmp_path: Path) -> None:
    args = ("inspect", tmp_path / "nothing")
    plain = run(*args, code=3).stderr.replace("\n", "\r\n").encode()
    assert plain.startswith(b"error: ")
    code, seen = on_a_terminal(*args)
    assert code == 3
    assert seen.startswith(b"\x1b[31m\x1b[1merror\x1b[0m: ")
    assert on_a_terminal(*args, "--no-color") == (3, plain)
    assert on_a_terminal("--no-color", *args) == (3, plain)
    assert on_a_terminal(*args, NO_COLOR="1") == (3, plain)
    assert b"\x1b[" in on_a_terminal(*args, NO_COLOR="")[1]  # an empty one does not count
    assert b"\x1b" not in run("inspect", AWQ).stdout_bytes


def test_the_progress_bar_is_for_terminals_and_quiet_says_nothing_there_either(tmp_path: Path) -> None:
    code, seen = on_a_terminal(SHARDED, "--out", tmp_path / "bar")
    assert code == 0
    assert b"preparing:" in seen
    assert b"layer 2/2" in seen
    assert on_a_terminal("-q", SHARDED, "--out", tmp_path / "quiet") == (0, b"")
    assert "preparing" not in run(SHARDED, "--out", tmp_path / "none").stderr


def test_the_progress_of_a_run_ends_at_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    totals: list[int] = []

    @contextlib.contextmanager
    def recorded(_console: Console, total: int, _layers: int, _what: str) -> Iterator[tuple[Any, Any]]:
        totals.append(total)
        yield steps.append, lambda _layer: None

    monkeypatch.setattr(Console, "progress", recorded)
    run(SHARDED, "--out", tmp_path / "out")
    assert totals == [sum(steps)]


def test_there_is_a_traceback_with_debug_alone_and_the_same_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("inspect", tmp_path / "nothing")
    plain = run(*args, code=3).stderr
    assert plain.startswith("error: ")
    shown = run(*args, "--debug", code=3).stderr
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.endswith(f": {tmp_path / 'nothing'}: is neither a folder nor a file\n{plain}")
    with start("--debug", *args) as process:
        assert process.communicate() == ("", shown)
        assert process.returncode == 3
    assert document(*args, "--debug", code=3)["error"]["kind"] == "checkpoint"

    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr("sm70_convert.describe.describe_path", full)
    shown = run("inspect", "x", "--debug", code=5).stderr
    assert "\nOSError: [Errno 28] No space left on device: '/x'\nerror: /x: No space left on device\n" in shown


@pytest.mark.parametrize(("args", "message"), [
    (("MODEL", "--json", "--out"), "Option '--out' requires an argument."),
    (("--json", "plan", "MODEL", "--bogus"), "No such option '--bogus'."),
    (("MODEL", "--out", "OUT", "--tp-size", "0", "--json"),
     "Invalid value for '--tp-size': 0 is not in the range 1<=x<=1024."),
    (("verify", "--json"), "Missing argument 'DIR'."),
    (("--json",), "Usage: main MODEL --out DIR [OPTIONS]"),
])  # fmt: skip
def test_wrong_usage_is_a_document_with_json(args: tuple[str, ...], message: str) -> None:
    result = run(*args, code=2)
    assert result.stderr == ""
    error = json.loads(result.stdout)
    assert [e.message for e in Draft202012Validator(schema("error")).iter_errors(error)] == []
    assert (error["error"]["kind"], error["error"]["exit_code"]) == ("usage", 2)
    (problem,) = error["error"]["problems"]
    assert problem["message"].startswith(message.rstrip("."))  # some versions of click suggest another option
    assert problem["hint"] == "see sm70-convert --help"


NASTY = "model.layers.0.mlp.experts.0.\x1b[31mred\r\x07\u202e"
ESCAPED = "model.layers.0.mlp.experts.0.\\x1b[31mred\\r\\x07\\u202e"


def add_tensor(shard: Path, name: str) -> None:
    """Puts one more tensor of one byte at the end of a shard."""
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:end]), data[end:] + b"\0"
    header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [len(body) - 1, len(body)]}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_control_characters_of_a_tensor_name_never_reach_the_terminal(own_model: Path, tmp_path: Path) -> None:
    shard = own_model / "model-00001-of-00003.safetensors"
    add_tensor(shard, NASTY)
    stale = run("plan", own_model, color=True).stdout  # the index does not list it: a finding
    assert f"(such as {ESCAPED} (model-00001-of-00003.safetensors))" in stale
    index = own_model / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"][NASTY] = shard.name
    index.write_text(json.dumps(listed))
    refused = run("plan", own_model, code=4, color=True).stderr
    assert (
        f"{ESCAPED} (model-00001-of-00003.safetensors): lies in the experts, but its name is not understood" in refused
    )
    shown = run("inspect", shard, color=True).stdout
    for text in (stale, refused, shown):
        assert not {"\r", "\x07", "\u202e"} & set(text)
        assert "\x1b[31mred" not in text
    assert ESCAPED in shown


# Resuming


def test_the_same_plan_again_is_complete_and_rewrites_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--tp-size", 1, "--tp-size", 2)
    before = stamps(out)
    for sizes in ((1, 2), (1,), (2,)):
        args = [a for size in sizes for a in ("--tp-size", size)]
        done = document(model, "--out", out, *args, "--jobs", 1)
        assert (done["status"], done["tp_sizes"], done["bytes_written"]) == ("complete", [1, 2], 0)
    assert document(model, "--out", out, "--layers", "1-2")["status"] == "complete"
    assert stamps(out) == before


@pytest.mark.parametrize("hash_name", ["blake3", "sha256"])
def test_one_more_tp_size_gives_what_both_at_once_give(model: Path, tmp_path: Path, hash_name: str) -> None:
    run(model, "--out", tmp_path / "both", "--tp-size", 1, "--tp-size", 4, "--hash", hash_name)
    run(model, "--out", tmp_path / "added", "--tp-size", 4, "--hash", hash_name)
    first = {p: s for p, s in stamps(tmp_path / "added").items() if p.endswith(".safetensors")}
    done = document(model, "--out", tmp_path / "added", "--tp-size", 1, "--hash", hash_name)
    assert (done["status"], done["tp_sizes"], done["layers_prepared"]) == ("added", [1, 4], [0, 1, 2, 3])
    assert contents(tmp_path / "added") == contents(tmp_path / "both")
    assert first.items() < stamps(tmp_path / "added").items()


def widen_header(shard: Path) -> None:
    """Eight more spaces in the header: other bytes, the same tensors, the same mtime."""
    before, data = shard.stat(), shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    shard.write_bytes((end).to_bytes(8, "little") + data[8:end] + b" " * 8 + data[end:])
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("change", ["mtime", "header", "config", "index"])
def test_a_source_that_has_changed_between_is_5_and_named(own_model: Path, tmp_path: Path, change: str) -> None:
    out, shard = tmp_path / "out", own_model / SHARD
    run(own_model, "--out", out, "--layers", "0-1")
    before = contents(out)
    if change == "mtime":
        os.utime(shard, ns=(shard.stat().st_atime_ns, shard.stat().st_mtime_ns + 1))
        field = f"mtimes.{SHARD}"
    elif change == "header":
        widen_header(shard)
        field = f"shards.{SHARD}.bytes"
    else:
        path = own_model / {"config": "config.json", "index": "model.safetensors.index.json"}[change]
        path.write_text(path.read_text() + "\n")
        field = f"source.{change}"
    for args in ((), ("--layers", "2-3")):
        (problem,) = problems(own_model, "--out", out, *args, code=5)
        assert problem["message"] == f"belongs to another plan: {field} differs"
        assert problem["file"] == "sm70/journal-0-1.jsonl"
        assert problem["expected"] != problem["actual"]
        assert problem["hint"] == "use another --out, or --overwrite to start over"
    assert contents(out) == before


def test_a_sealed_folder_takes_no_other_source(own_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(own_model, "--out", out)
    before = contents(out)
    widen_header(own_model / SHARD)
    for size in (1, 2):
        (problem,) = problems(own_model, "--out", out, "--tp-size", size, code=5)
        assert problem["message"] == f"belongs to another plan: shards.{SHARD}.bytes differs"
        assert problem["file"] == "sm70/manifest.json"
    assert contents(out) == before


def test_a_changed_expert_behind_the_same_header_is_5_when_a_tp_size_is_added(own_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(own_model, "--out", out)
    sealed = (out / "sm70/manifest.json").read_bytes()
    header = json.loads(run("inspect", own_model / SHARD, "--json").stdout)["tensors"]
    name = next(n for n in header if n.endswith("experts.1.gate_proj.qweight"))
    with open(own_model / SHARD, "r+b") as file:
        start_of_data = 8 + int.from_bytes(file.read(8), "little")
        offset = start_of_data + json.loads(file.read(start_of_data - 8))[name]["data_offsets"][0]
    flip(own_model / SHARD, offset)
    (problem,) = problems(own_model, "--out", out, "--tp-size", 2, code=5)
    assert problem["tensor"] == name.replace("experts.1.", "experts.{expert}.")
    assert problem["message"] == "differs from what this folder was made of"
    assert problem["expected"] != problem["actual"]
    assert (out / "sm70/manifest.json").read_bytes() == sealed


def test_a_finished_layer_that_was_damaged_is_made_again(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--tp-size", 2, "--layers", "0-2")
    flip(out / "sm70/tp2/rank0/layer-00001.safetensors")
    (out / "sm70/tp2/rank1/layer-00002.safetensors").unlink()
    done = document(model, "--out", out, "--tp-size", 2)
    assert (done["layers_resumed"], done["layers_prepared"]) == ([0], [1, 2, 3])
    assert contents(out) == whole


# Signals


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def held_in_the_middle(out: Path, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A conversion into `out`, held by SIGSTOP when a layer is done and the next ones are being written."""
    for _ in range(20):
        with start(*args, "--out", out) as process:
            try:
                while process.poll() is None:
                    if any(j.read_bytes().count(b"\n") > 1 for j in (out / "sm70").glob("journal*.jsonl")):
                        process.send_signal(signal.SIGSTOP)
                        while process.poll() is None and not is_stopped(process.pid):
                            time.sleep(0.001)
                        unfinished = not (out / "config.json").exists() and any(out.rglob(".*.sm70-tmp"))
                        if process.poll() is None and unfinished:
                            yield process
                            return
                        process.send_signal(signal.SIGCONT)
                    time.sleep(0.001)
            finally:
                if process.poll() is None:
                    process.kill()
        shutil.rmtree(out)  # it was too quick for us
    pytest.fail("the conversion was always over before it could be held")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A checkpoint of some 100 MB, and what an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("large")
    write_checkpoint(folder / "model", Synthetic("awq", 20, 16, 512, 384, group_size=64, shards=4, vocab=1024))
    run(folder / "model", "--out", folder / "out", "--tp-size", 2)
    made = contents(folder / "out")
    shutil.rmtree(folder / "out")
    return folder / "model", made


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(("number", "code", "word"), [(2, 130, "interrupted"), (15, 143, "terminated"), (9, -9, "")])
def test_a_stopped_run_seals_nothing_and_resumes_to_the_same_bytes(
    large: tuple[Path, dict[str, str]], tmp_path: Path, number: int, code: int, word: str, jobs: int
) -> None:
    model, made = large
    out = tmp_path / "out"
    args = (model, "--tp-size", 2, "--jobs", jobs, "--device", "cpu")
    with held_in_the_middle(out, *args) as process:
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (code, "")
    assert not (out / "sm70/manifest.json").exists()
    if word:
        assert stderr == f"error: {word}\nnext: run the same command again: it resumes\n"
        assert [p for p in out.rglob("*") if p.name.startswith(".")] == []  # neither temporary files nor locks
    lines = (out / "sm70/journal.jsonl").read_text().split("\n")
    recorded = [json.loads(line)["layer"] for line in lines[1:-1]]
    (problem,) = problems("verify", out, code=6)
    assert problem["file"] == "sm70/manifest.json"
    done = document(*args, "--out", out)
    assert (done["status"], done["layers_resumed"]) == ("sealed", sorted(recorded))
    assert len(done["layers_prepared"]) == 20 - len(recorded) > 0
    assert contents(out) == made


def test_an_interrupt_during_a_commit_leaves_no_temporary_file_of_another_finished_layer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = sm70_convert.convert.wait
    monkeypatch.setattr(sm70_convert.convert, "wait", lambda futures, **_: everything(futures))

    def interrupted(_writer: BankWriter) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BankWriter, "commit", interrupted)
    assert "error: interrupted" in run(model, "--out", tmp_path / "out", "--jobs", 2, code=130).stderr
    assert list((tmp_path / "out").rglob(".*.sm70-tmp")) == []


# Parts


def test_parts_and_a_seal_give_what_a_whole_run_gives(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out, args = tmp_path / "out", ("--tp-size", 2, "--layers")
    for layers, prepared in (("0,2", [0, 2]), ("1", [1]), ("3", [3])):
        done = document(model, "--out", out, *args, layers)
        assert (done["status"], done["layers_prepared"]) == ("part", prepared)
        assert not (out / "config.json").exists()
    done = document("seal", out)
    assert (done["status"], done["layers_resumed"], done["tp_sizes"]) == ("sealed", [0, 1, 2, 3], [2])
    assert contents(out) == whole


def test_parts_at_once_give_what_a_whole_run_gives(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = [start(model, "--out", out, "--tp-size", 2, "--layers", part) for part in ("0-1", "2-3")]
    for process in running:
        stderr = process.communicate(timeout=60)[1]
        assert process.returncode == 0, stderr
    run("seal", out)
    assert contents(out) == whole


def test_a_whole_run_takes_over_what_parts_made(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--tp-size", 2, "--layers", "1,3")
    done = document(model, "--out", out, "--tp-size", 2)
    assert (done["status"], done["layers_resumed"], done["layers_prepared"]) == ("sealed", [1, 3], [0, 2])
    assert contents(out) == whole


def test_parts_can_add_a_tp_size_to_a_sealed_folder(model: Path, tmp_path: Path) -> None:
    run(model, "--out", tmp_path / "both", "--tp-size", 1, "--tp-size", 2)
    run(model, "--out", tmp_path / "out", "--tp-size", 1)
    for part in ("0-1", "2-3"):
        run(model, "--out", tmp_path / "out", "--tp-size", 2, "--layers", part)
    run("seal", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "both")


def test_a_seal_with_layers_missing_is_5_and_seals_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--layers", 1)
    (problem,) = problems("seal", out, code=5)
    assert problem["message"] == "layers 0,2-3 are not made yet"
    assert problem["hint"] == "make them with --layers 0,2-3, then seal again"
    assert not (out / "sm70/manifest.json").exists()


def test_a_seal_of_what_is_no_unfinished_folder_is_5(tmp_path: Path) -> None:
    (problem,) = problems("seal", tmp_path / "nothing", code=5)
    assert problem["message"] == "has no journal of parts to seal"
    run(AWQ, "--out", tmp_path / "out")
    (problem,) = problems("seal", tmp_path / "out", code=5)
    assert problem["message"] == "has no journal of parts to seal (it is sealed already)"


def test_a_seal_finds_the_checkpoint_where_it_was_moved_to(
    own_model: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(own_model, "--out", out, "--tp-size", 2, "--layers", "0-3")
    moved = own_model.rename(tmp_path / "moved")
    assert problems("seal", out, code=3)[0]["file"] == str(own_model)
    run("seal", out, "--source", moved)
    assert contents(out) == whole


def test_a_seal_refuses_a_bank_that_is_not_what_its_part_wrote(model: Path, tmp_path: Path) -> None:
    out, bank = tmp_path / "out", "sm70/tp1/rank0/layer-00002.safetensors"
    run(model, "--out", out, "--layers", "0-3")
    flip(out / bank)
    (problem,) = problems("seal", out, code=6)
    assert (problem["file"], problem["layer"]) == (bank, 2)
    assert problem["hint"] == "make it again with --layers 2"
    assert not (out / "sm70/manifest.json").exists()


def test_of_two_overlapping_parts_at_once_the_second_is_5(large: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    model, out = large[0], tmp_path / "out"
    with held_in_the_middle(out, model, "--layers", "0-9", "--jobs", 1) as process:
        for layers in (("--layers", "9-10"), ("--layers", "0-9"), ()):
            (problem,) = problems(model, "--out", out, *layers, code=5)
            assert problem["message"] == "another run is working on this folder"
            assert problem["file"] == "sm70/.journal-0-9.jsonl.lock"
        assert problems("seal", out, code=5)[0]["message"] == "another run is working on this folder"
        assert document(model, "--out", out, "--layers", "10-11")["status"] == "part"
        process.send_signal(signal.SIGCONT)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 0, stderr
    assert document(model, "--out", out, "--layers", "9-11")["layers_resumed"] == [9, 10, 11]


# Overwriting


def test_overwrite_starts_over(model: Path, whole: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(AWQ, "--out", out, "--hash", "sha256")
    run(model, "--out", out, "--tp-size", 2, "--overwrite")
    assert contents(out) == whole
    run(model, "--out", out, "--tp-size", 1, "--layers", 0, "--overwrite")
    assert not (out / "sm70/manifest.json").exists()
    run(model, "--out", out, "--tp-size", 2, "--overwrite")
    assert contents(out) == whole


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "my.safetensors", "plots/loss.txt", "sm70/notes.txt", "sm70/tp2/rank0/notes.txt"]
)
@pytest.mark.parametrize("state", ["sealed", "part"])
def test_overwrite_with_a_foreign_file_names_it_and_removes_nothing(
    model: Path, tmp_path: Path, foreign: str, state: str
) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--tp-size", 2, *(("--layers", "0-1") if state == "part" else ()))
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).write_text("mine")
    before = contents(out)
    (problem,) = problems(model, "--out", out, "--overwrite", code=5)
    assert problem["message"] == f"holds files that this tool did not write: {foreign}"
    assert contents(out) == before
    (out / foreign).unlink()
    run(model, "--out", out, "--overwrite")


def test_overwrite_refuses_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (problem,) = problems(AWQ, "--out", out, "--overwrite", code=5)
    assert problem["message"].endswith("that would say what --overwrite may remove")
    assert (out / "config.json").read_text() == "{}"


def test_a_dry_run_makes_nothing_even_with_overwrite(model: Path, tmp_path: Path) -> None:
    run(model, "--out", tmp_path / "new", "--dry-run")
    assert not (tmp_path / "new").exists()
    run(model, "--out", tmp_path / "out")
    before = stamps(tmp_path / "out")
    run(model, "--out", tmp_path / "out", "--tp-size", 2, "--dry-run", "--overwrite")
    assert stamps(tmp_path / "out") == before


# The same bytes, digests, links


def test_the_bytes_depend_on_neither_jobs_nor_folder(model: Path, tmp_path: Path) -> None:
    made = []
    for jobs, name in ((1, "one"), (2, "another/much longer one"), (8, "third")):
        run(model, "--out", tmp_path / name, "--tp-size", 1, "--tp-size", 2, "--jobs", jobs)
        made.append(contents(tmp_path / name))
    assert made[0] == made[1] == made[2]
    assert len(made[0]) > 4 * 3


def test_sha256sum_accepts_the_sums_of_every_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--tp-size", 2, "--hash", "sha256")
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summed = {line.removesuffix(": OK") for line in done.stdout.splitlines()}
    assert summed == set(contents(out)) - {"SHA256SUMS"}
    run("verify", out)
    flip(out / "sm70/tp2/rank0/layer-00000.safetensors")
    done = subprocess.run(check, cwd=out, capture_output=True, text=True)
    assert done.returncode == 1
    assert "sm70/tp2/rank0/layer-00000.safetensors: FAILED" in done.stdout


@pytest.mark.parametrize("name", [b"two\nlines.txt", b"back\\slash.txt", "café.txt".encode()])
def test_sha256sum_accepts_a_file_of_any_name(own_model: Path, tmp_path: Path, name: bytes) -> None:
    out = tmp_path / "out"
    (own_model / os.fsdecode(name)).write_text("kept")
    run(own_model, "--out", out, "--hash", "sha256")
    assert (out / os.fsdecode(name)).read_text() == "kept"
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b": OK\n") == len(contents(out)) - 1
    run("verify", out)


def test_a_file_whose_name_is_no_utf_8_is_refused_by_name(own_model: Path, tmp_path: Path) -> None:
    (own_model / os.fsdecode(b"caf\xe9.txt")).write_text("kept")
    (problem,) = problems(own_model, "--out", tmp_path / "out", code=3)
    assert problem["message"] == "has a name that is not UTF-8, which a manifest cannot hold"
    assert problem["file"] == "caf\udce9.txt"


def test_blake3_writes_no_sums(whole: dict[str, str]) -> None:
    assert "SHA256SUMS" not in whole


@pytest.mark.parametrize("mode", ["hardlink", "symlink"])
def test_whole_shards_are_linked_as_asked_and_verify(tmp_path: Path, mode: str) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(SHARDED, source)
    run(source, "--out", out, "--passthrough", mode)
    run(source, "--out", tmp_path / "copied")
    linked = {"model-00001-of-00007.safetensors", "model-00007-of-00007.safetensors"}
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        if path.is_file():
            assert (name in linked) == (path.stat().st_nlink > 1 if mode == "hardlink" else path.is_symlink()), name
    for name in linked:
        assert (out / name).samefile(source / name)
        if mode == "symlink":
            assert (out / name).readlink() == source / name
    assert contents(out) == contents(tmp_path / "copied")
    run("verify", out)
    run("verify", out, "--source", source)
    flip(source / "model-00001-of-00007.safetensors")
    assert problems("verify", out, code=6)[0]["file"] == "model-00001-of-00007.safetensors"


def test_a_hard_link_is_to_the_file_behind_a_symlink(tmp_path: Path) -> None:
    source, blobs, out = tmp_path / "model", tmp_path / "blobs", tmp_path / "out"
    shutil.copytree(SHARDED, blobs)
    source.mkdir()
    for blob in blobs.iterdir():
        (source / blob.name).symlink_to(blob)
    run(source, "--out", out, "--passthrough", "hardlink")
    name = "model-00001-of-00007.safetensors"
    assert not (out / name).is_symlink()
    assert (out / name).samefile(blobs / name)
    assert not any(p.is_symlink() for p in out.rglob("*"))


def test_a_hard_link_to_another_file_system_is_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    (problem,) = problems(SHARDED, "--out", tmp_path / "out", "--passthrough", "hardlink", code=5)
    assert problem["file"] == "model-00001-of-00007.safetensors"
    assert problem["message"] == "cannot be made as a hardlink: Invalid cross-device link"
    assert problem["hint"] == "use --passthrough copy (or symlink)"
    assert not (tmp_path / "out/sm70/manifest.json").exists()
    assert document(SHARDED, "--out", tmp_path / "out")["layers_resumed"] == [1, 2]


def test_sampled_and_one_rank_verification_compare_less(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, "--out", out, "--tp-size", 2)
    assert document("verify", out, "--source", model)["experts"] == 16
    sampled = document("verify", out, "--source", model, "--sample", 1)
    assert (sampled["experts"], sampled["tensors"]) == (4, 4 * 2 * 4)
    flip(out / "sm70/tp2/rank1/layer-00003.safetensors")
    run("verify", out, "--rank", 0)
    assert problems("verify", out, "--rank", 1, code=6)[0]["file"] == "sm70/tp2/rank1/layer-00003.safetensors"


def test_verifying_against_another_source_is_6(own_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(own_model, "--out", out)
    widen_header(own_model / SHARD)
    (problem,) = problems("verify", out, "--source", own_model, code=6)
    assert problem["message"] == f"was made from another checkpoint: shards.{SHARD}.bytes differs"


def test_too_little_room_is_5_before_anything_is_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoom:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: NoRoom)
    (problem,) = problems(model, "--out", tmp_path / "out", code=5)
    assert (problem["message"], problem["actual"]) == ("has not enough free space", "4096")
    assert not (tmp_path / "out").exists()
