"""`env --check` and `env --acceptance`: what a runtime makes of a prepared folder, told before a start, and proved by some."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fake_runtime import NVIDIA_SMI, make_runtime
from sm70_convert import environment, runtime_check
from sm70_convert.acceptance import acceptance_script
from sm70_convert.cli import main
from sm70_convert.devices import CudaDevice
from sm70_convert.layout import LAYOUTS, Layout, MoeShape, QuantizationSpec, runtime_flags
from sm70_convert.manifest import MANIFEST, read_manifest
from sm70_convert.runtime_check import (
    ALLOW,
    AWQ_OFF,
    AWQ_ON,
    BATCHED,
    COMPACT,
    DENY,
    FUSED,
    INT4_ZERO,
    LEGACY,
    RAW,
    Question,
    RefusedSettings,
    Settings,
)

DATA = Path(__file__).parent / "data"
AWQ = DATA / "gptqmodel-awq-gemm-g32-qwen3moe"
NVFP4 = DATA / "modelopt-nvfp4-qwen3moe-sharded"
QWEN38 = {"experts": 512, "hidden": 2560, "intermediate": 640, "top_k": 10}
OTHER_LAYOUT = "the runtime asks for another layout than this folder has"
V100 = CudaDevice("Tesla V100-SXM2-32GB", (7, 0))
Runtimes = Callable[..., None]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def convert(source: Path, out: Path, *options: object) -> Path:
    result = run(source, "--out", out, *options)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(AWQ, tmp_path_factory.mktemp("awq") / "out", "--tp-size", 1, "--tp-size", 2, "--tp-size", 4)


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(NVFP4, tmp_path_factory.mktemp("nvfp4") / "out", "--tp-size", 4)


def copy(folder: Path, tmp_path: Path, **identity: dict[str, Any]) -> Path:
    """A folder to spoil. `identity` overrides parts of what the manifest says, as if another model had been converted."""
    target = tmp_path / "copy"
    shutil.copytree(folder, target)
    manifest = read_manifest(target)
    changed = {k: {**manifest.identity[k], **v} for k, v in identity.items()}
    (target / MANIFEST).write_bytes(replace(manifest, identity={**manifest.identity, **changed}).encode())
    return target


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtimes:
    """Puts a runtime into this environment, with no settings of the shell's and four V100s."""
    for name in [n for n in os.environ if n.startswith("VLLM_")]:
        monkeypatch.delenv(name)

    def install(kind: str | None, *, devices: tuple[CudaDevice, ...] = (V100,) * 4, **options: Any) -> None:
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        monkeypatch.setattr(runtime_check, "cuda_devices", lambda: list(devices))
        monkeypatch.setattr(environment, "cuda_devices", lambda: list(devices))
        if kind is None:
            find = importlib.util.find_spec
            monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "vllm" else find(n))
        else:
            monkeypatch.syspath_prepend(make_runtime(tmp_path / "fake", kind, **options))

    return install


def refused(result: Result, code: int) -> list[str]:
    assert result.exit_code == code, result.output
    return result.stderr.splitlines()


@pytest.mark.parametrize("kind", ["revolta", "1cat", "stock"])
def test_awq_is_taken(awq: Path, runtime: Runtimes, kind: str) -> None:
    runtime(kind)
    result = run("env", "--check", awq, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["command"] == "env"
    check = document["check"]
    assert check["runtime"] == document["runtime"]["kind"] == kind
    assert check["layout"] == {"name": "awq-half2", "interleave_gate_up": True}
    assert check["tp_sizes"] == [1, 2, 4]
    assert check["files"] == len(read_manifest(awq).files)
    assert check["serve"] == [{"tp_size": size, "options": []} for size in (1, 2, 4)]
    assert [w[:12] for w in check["warnings"]] == (["a stock vLLM"] if kind == "stock" else [])
    shown = run("env", "--check", awq, "--tp-size", 2)
    assert f"{awq} --load-format sm70_prepared --tensor-parallel-size 2" in shown.stdout
    if kind != "stock":  # whose command depends on which distribution it is
        assert f"vllm serve {awq} --load" in shown.stdout
    assert "tensor-parallel-size 4" not in shown.stdout


def test_a_plain_env_says_nothing_of_a_check(runtime: Runtimes) -> None:
    runtime("revolta")
    assert "check" not in json.loads(run("env", "--json").stdout)
    assert run("env", "--tp-size", 2).exit_code == 2
    assert run("env", "--acceptance", "--json").exit_code == 2


def test_no_runtime(awq: Path, runtime: Runtimes) -> None:
    runtime(None)
    assert "error: no vllm in this environment" in refused(run("env", "--check", awq), 4)


def test_no_plugin(awq: Path, runtime: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime("revolta")
    monkeypatch.setattr(runtime_check, "entry_points", lambda **_: ())
    lines = refused(run("env", "--check", awq), 4)
    assert lines[0] == "error: the plugin is not installed: no entry point sm70_prepared in vllm.general_plugins"
    assert "pip install --no-deps sm70-convert" in lines[1]


def test_the_plugin_kept_out(awq: Path, runtime: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime("revolta")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    assert refused(run("env", "--check", awq), 4) == [
        "error: VLLM_PLUGINS=lora_filesystem_resolver keeps the plugin out",
        "next: unset VLLM_PLUGINS, or add sm70_prepared to it",
    ]
    monkeypatch.setenv("VLLM_PLUGINS", "other,sm70_prepared")
    assert run("env", "--check", awq).exit_code == 0


def test_a_tp_size_that_is_not_there(awq: Path, runtime: Runtimes) -> None:
    runtime("revolta")
    lines = refused(run("env", "--check", awq, "--tp-size", 8), 5)
    assert lines == [
        f"error: {awq}: has no banks for TP size 8: expected TP size 1 or 2 or 4, found 8",
        f"next: add banks: sm70-convert MODEL --out {awq} --tp-size 8",
    ]


def test_devices(awq: Path, runtime: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime("revolta", devices=())
    assert "no CUDA device is visible here" in run("env", "--check", awq).stderr
    monkeypatch.setattr(runtime_check, "cuda_devices", lambda: [V100])
    assert "1 V100s are visible here, and TP 4 needs 4" in run("env", "--check", awq, "--tp-size", 4).stderr
    monkeypatch.setattr(runtime_check, "cuda_devices", lambda: [CudaDevice("H200", (9, 0))])
    lines = refused(run("env", "--check", awq), 4)
    assert lines[0] == "error: SM70 kernels run on a V100 alone: expected an sm_70 device, found H200 (sm_90)"


def test_files(awq: Path, runtime: Runtimes, tmp_path: Path) -> None:
    runtime("revolta")
    folder = copy(awq, tmp_path)
    one, other = (folder / "sm70" / f"tp{t}" / "rank1" / "layer-00000.safetensors" for t in (2, 4))
    one.unlink()
    other.write_bytes(other.read_bytes()[:-1])
    lines = refused(run("env", "--check", folder), 6)
    assert lines[0].startswith("error: sm70/tp2/rank1/layer-00000.safetensors: is missing or cannot be read")
    assert lines[1].startswith("error: sm70/tp4/rank1/layer-00000.safetensors: has the wrong size: expected ")
    assert "tp4" in refused(run("env", "--check", folder, "--tp-size", 4), 6)[0]
    assert run("env", "--check", folder, "--tp-size", 1).exit_code == 0


def test_an_edited_config(awq: Path, runtime: Runtimes, tmp_path: Path) -> None:
    runtime("revolta")
    folder = copy(awq, tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 256', '"hidden_size": 512'))
    assert refused(run("env", "--check", folder), 6)[0] == "error: config.json: has other bytes than the manifest says"


def test_a_folder_that_is_not_sealed(runtime: Runtimes) -> None:
    runtime("revolta")
    assert "not a sealed folder" in refused(run("env", "--check", AWQ), 6)[-1]


def test_every_reason_is_said_at_once(awq: Path, runtime: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime("revolta")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv(BATCHED, "0")
    result = run("env", "--check", awq, "--tp-size", 8, "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["error"]["total"] == 2


def test_a_setting_that_asks_for_another_layout(awq: Path, runtime: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime("revolta")
    monkeypatch.setenv(LEGACY, "0")
    lines = refused(run("env", "--check", awq, "--tp-size", 2), 4)
    assert lines == [
        f"error: TP 2: {OTHER_LAYOUT}: expected awq-half2, interleave on, found awq-half2, interleave off",
        f"next: start with {LEGACY}=1, or convert with --layout awq-half2 --interleave off",
    ]


def test_nvfp4_shapes_that_no_runtime_takes(nvfp4: Path, runtime: Runtimes) -> None:
    runtime("revolta")
    assert (
        "ReVolta 0.1.4 takes NVFP4 banks only for its own list of shapes" in refused(run("env", "--check", nvfp4), 4)[0]
    )


def test_nvfp4_on_1cat(nvfp4: Path, runtime: Runtimes) -> None:
    runtime("1cat")
    assert "has no NVFP4 MoE kernels for SM70" in refused(run("env", "--check", nvfp4), 4)[0]


def test_nvfp4_on_stock(nvfp4: Path, runtime: Runtimes) -> None:
    runtime("stock", devices=())
    assert run("env", "--check", nvfp4).exit_code == 0


def test_the_raw_scales_of_qwen38(
    nvfp4: Path, runtime: Runtimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime("revolta")
    folder = copy(nvfp4, tmp_path, moe=QWEN38)
    assert refused(run("env", "--check", folder), 4) == [
        f"error: TP 4: {OTHER_LAYOUT}: expected nvfp4-fp16, interleave off, found nvfp4-raw, interleave on",
        f"next: start with {FUSED}=0 {RAW}=0, or convert with --layout nvfp4-raw --interleave on",
    ]
    monkeypatch.setenv(RAW, "0")
    assert f"start with {FUSED}=0, or" in refused(run("env", "--check", folder), 4)[1]
    monkeypatch.setenv(FUSED, "0")
    check = json.loads(run("env", "--check", folder, "--json").stdout)["check"]
    assert check["serve"] == [{"tp_size": 4, "options": []}]


def test_the_skinny_kernel_must_be_turned_off(nvfp4: Path, runtime: Runtimes, tmp_path: Path) -> None:
    runtime("revolta")
    folder = copy(nvfp4, tmp_path, moe={"experts": 256, "hidden": 2048, "intermediate": 512, "top_k": 8})
    result = run("env", "--check", folder)
    assert result.exit_code == 0, result.output
    assert """--tensor-parallel-size 4 --kernel-config '{"sm70_skinny_moe": false}'""" in result.stdout


BOTH = frozenset((COMPACT, INT4_ZERO))
AWQ_G32, NVFP4_G16 = QuantizationSpec("awq", 4, 32, True), QuantizationSpec("nvfp4", 4, 16, False)
QWEN = MoeShape((0, 1, 2), **QWEN38)
SMALL = MoeShape((0, 1, 2), 128, 2048, 768, 8)


def ask(spec: QuantizationSpec, moe: MoeShape, environ: dict[str, str], known: frozenset[str] = BOTH) -> str:
    """The layouts of layers 0, 1, 2 at TP 4, `+` for interleaved, one for all if they agree."""
    asked = [Question(spec, moe, 4, layer).answer(Settings(environ, known)) for layer in moe.layers]
    return " ".join(dict.fromkeys(f"{a.name}{'+' if a.interleave_gate_up else ''}" for a in asked))


@pytest.mark.parametrize(
    ("spec", "moe", "environ", "expected"),
    [
        (AWQ_G32, QWEN, {}, "awq-compact+"),
        (AWQ_G32, QWEN, {COMPACT: "1"}, "awq-compact+"),
        (AWQ_G32, QWEN, {COMPACT: "0"}, "awq-half2+"),
        (AWQ_G32, QWEN, {INT4_ZERO: "1"}, "awq-int4zero+"),
        (AWQ_G32, QWEN, {BATCHED: "0"}, "awq-compact"),
        (AWQ_G32, QWEN, {LEGACY: "0", COMPACT: "0"}, "awq-half2"),
        (AWQ_G32, SMALL, {}, "awq-half2+"),
        (AWQ_G32, SMALL, {COMPACT: "0"}, "awq-half2+"),
        (AWQ_G32, SMALL, {ALLOW: "0, 2"}, "awq-half2+ awq-half2"),
        (AWQ_G32, SMALL, {ALLOW: ""}, "awq-half2"),
        (AWQ_G32, SMALL, {DENY: "0-1"}, "awq-half2 awq-half2+"),
        (replace(AWQ_G32, group_size=128), QWEN, {}, "awq-half2+"),
        (NVFP4_G16, QWEN, {}, "nvfp4-raw+"),
        (NVFP4_G16, QWEN, {RAW: "0"}, "nvfp4-fp16+"),
        (NVFP4_G16, QWEN, {FUSED: "0"}, "nvfp4-raw"),
        (NVFP4_G16, SMALL, {RAW: "1", FUSED: "1"}, "nvfp4-fp16"),
    ],
)
def test_what_a_runtime_asks_for(spec: QuantizationSpec, moe: MoeShape, environ: dict[str, str], expected: str) -> None:
    assert ask(spec, moe, environ) == expected


def test_a_runtime_that_does_not_know_compact_scales() -> None:
    assert ask(AWQ_G32, QWEN, {COMPACT: "1", INT4_ZERO: "1"}, frozenset()) == "awq-half2+"


@pytest.mark.parametrize(
    ("moe", "environ", "message"),
    [
        (SMALL, {COMPACT: "1"}, f"{COMPACT}=1 stops the runtime"),
        (SMALL, {INT4_ZERO: "1"}, f"{INT4_ZERO}=1 stops the runtime"),
        (QWEN, {INT4_ZERO: "1", COMPACT: "0"}, f"{INT4_ZERO}=1 stops the runtime"),
        (QWEN, {AWQ_OFF: "1"}, f"{AWQ_OFF}=1 sends the experts to another backend"),
        (QWEN, {AWQ_ON: "0"}, f"{AWQ_ON}=0 sends the experts to another backend"),
        (QWEN, {BATCHED: "yes"}, f"{BATCHED}=yes is not 0 or 1"),
        (QWEN, {DENY: "3-1"}, f"{DENY}: '3-1' runs backwards"),
    ],
)
def test_settings_that_stop_a_runtime(moe: MoeShape, environ: dict[str, str], message: str) -> None:
    with pytest.raises(RefusedSettings, match=message.replace("(", r"\(")):
        ask(AWQ_G32, moe, environ)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("name", [n for names in LAYOUTS.values() for n in names])
def test_the_settings_of_a_layout_make_the_runtime_ask_for_it(name: str, interleave: bool) -> None:
    """Of every layout, from no settings and from those of every other layout of the format."""
    spec = AWQ_G32 if name.startswith("awq") else NVFP4_G16
    wanted = Layout(name, interleave, spec.group_size)
    question = Question(spec, QWEN, 4, 0)
    starts = [{}] + [runtime_flags(Layout(n, i, 0)) for n in LAYOUTS[spec.format] for i in (True, False)]
    for environ in starts:
        changes = question.changes(Settings(environ, BOTH), wanted)
        settings = dict(change.split("=") for change in changes.split())
        assert question.answer(Settings({**environ, **settings}, BOTH)) == wanted
        # None is idle: without any one of them the runtime asks for something else, or stops.
        for name_left_out in settings:
            fewer = {**environ, **{k: v for k, v in settings.items() if k != name_left_out}}
            with contextlib.suppress(RefusedSettings):
                assert question.answer(Settings(fewer, BOTH)) != wanted
    assert len(starts) == 1 + 2 * len(LAYOUTS[spec.format])


def test_no_setting_helps() -> None:
    wanted = Layout("awq-compact", True, 32)
    assert Question(AWQ_G32, SMALL, 4, 0).changes(Settings({}, BOTH), wanted) == ""
    listed = Settings({ALLOW: "5"}, BOTH)
    assert Question(AWQ_G32, SMALL, 4, 0).changes(listed, Layout("awq-half2", True, 32)) == f"{ALLOW} unset"


def test_the_script_is_printed_as_it_is() -> None:
    result = run("env", "--acceptance")
    assert result.exit_code == 0
    assert result.stdout == acceptance_script()
    assert result.stdout.startswith("#!/usr/bin/env bash\n")
    assert subprocess.run(["bash", "-n"], input=result.stdout, text=True).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_is_clean() -> None:
    checked = subprocess.run(["shellcheck", "-"], input=acceptance_script(), text=True, capture_output=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def accept(tmp_path: Path, folder: Path, answers: str = "") -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Runs the script against a fake runtime; gives its outcome and the options of every start."""
    fake = make_runtime(tmp_path / "fake", "stock")
    tools = tmp_path / "bin"
    tools.mkdir()
    here = Path(__file__).parents[1]
    commands = {
        "nvidia-smi": NVIDIA_SMI,
        "sm70-convert": f'#!/bin/sh\nexec "{sys.executable}" -W ignore -m sm70_convert.cli "$@"\n',
    }
    for name, text in commands.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join((str(fake), str(here / "convert"), str(here / "kernels")))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    variables = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "PYTHON": sys.executable,
        "WORK": str(tmp_path / "deep" / "work"),
        "PORT": str(port),
        "START_SECONDS": "60",
        "STARTS": str(tmp_path / "starts"),
        "PREPARED": str(folder),
        "ANSWERS": answers,
    }
    script = tmp_path / "acceptance.sh"
    script.write_text(acceptance_script())
    done = subprocess.run(
        ["bash", script, AWQ, folder, "2", "--kernel-config", "a b"],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    return done, starts


def test_the_script_proves_equality(awq: Path, tmp_path: Path) -> None:
    done, starts = accept(tmp_path, awq)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "deep" / "work" / "report.txt").read_text()
    assert done.stdout.endswith(report)
    lines = report.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [
        "recording",
        "ordinary-1",
        "prepared-1",
        "ordinary-2",
        "prepared-2",
    ]
    assert all(line.split()[2:] == ["900", "300"] for line in lines[1:6])
    assert lines[6] == "digests: equal"
    assert lines[7] == "tokens: equal; 46 compared, largest difference of a log-probability 0"
    assert [s[s.index("--model") + 1] for s in starts] == [str(m) for m in (AWQ, AWQ, awq, AWQ, awq)]
    formats = [s[s.index("--load-format") + 1] if "--load-format" in s else "" for s in starts]
    assert formats == ["sm70_record", "", "sm70_prepared", "", "sm70_prepared"]
    assert all(s[-2:] == ["--kernel-config", "a b"] for s in starts)
    assert "recorded digests, all equal" in done.stdout


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ("other tokens", 1, "tokens: DIFFERENT"),
        ("other bits", 1, "digests: DIFFERENT"),
        ("unsteady", 2, "tokens: no verdict: the ordinary starts differ among themselves"),
    ],
)
def test_the_script_sees_a_difference(awq: Path, tmp_path: Path, answers: str, code: int, said: str) -> None:
    done, starts = accept(tmp_path, awq, answers)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert len(starts) == 5


def test_the_script_stops_before_a_start_that_cannot_work(awq: Path, tmp_path: Path) -> None:
    (tmp_path / "starts").touch()
    folder = copy(awq, tmp_path)
    next((folder / "sm70" / "tp2" / "rank0").iterdir()).unlink()
    done, starts = accept(tmp_path, folder)
    assert done.returncode == 6
    assert starts == []
