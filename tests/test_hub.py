"""Hub ids through huggingface_hub: from a hub on this machine, and from its cache alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from jsonschema import Draft202012Validator

DATA = Path(__file__).parent / "data"
SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"
AWQ = DATA / "autoawq-gemm-g64-qwen3moe"  # one file, no index
SHARDED = DATA / "modelopt-nvfp4-qwen3moe-sharded"
REPO = "org/model-NVFP4"
OLD, NEW = "1" * 40, "2" * 40
INDEX = "model.safetensors.index.json"
Files = dict[str, bytes]


def files_of(folder: Path) -> Files:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@dataclass
class Repo:
    """One repository: its commits, where its branches are, and what it answers instead of files."""

    commits: dict[str, Files]
    branches: dict[str, str]
    refuse: tuple[int, str, str] | None = None  # status, X-Error-Code, message
    hide_info: bool = False  # refuse the listing too
    lost: tuple[str, ...] = ()  # listed, but not to be had
    cut: tuple[str, ...] = ()  # half of it comes, then the connection ends


@dataclass
class Hub:
    """What a hub answers to huggingface_hub, for a few repositories in memory."""

    repos: dict[str, Repo] = field(default_factory=dict)
    fetched: list[tuple[str, str, str]] = field(default_factory=list)  # repo, commit, file: every GET of a file
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        parts = [unquote(p) for p in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo = self.hub.repos.get("/".join(parts[:2]))
        if repo is None:
            return self.error(404, "RepoNotFound", "Repository not found")
        if repo.refuse and (not api or repo.hide_info):
            return self.error(*repo.refuse)
        kind, revision = [*parts, "revision", "main"][2:4]
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.commits[commit]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self.json({"id": "/".join(parts[:2]), "sha": commit, "siblings": siblings})
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha256(data).hexdigest()[:40]}
                for name, data in files.items()
            ]
            return self.json(entries)
        name = "/".join(parts[4:])
        if name not in files or name in repo.lost:
            return self.error(404, "EntryNotFound", "Entry not found")
        return self.file("/".join(parts[:2]), commit, name, files[name], cut=name in repo.cut)

    def file(self, repo: str, commit: str, name: str, data: bytes, *, cut: bool) -> None:
        self.send_response(200)
        self.send_header("X-HF-Warning", "Authentication; You are sending unauthenticated requests.")  # as the real one
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.hub.fetched.append((repo, commit, name))
            self.wfile.write(data[: len(data) // 2] if cut else data)

    def json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    handler = type("OneHub", (Handler,), {"hub": made})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()
        thread.join()


@dataclass(frozen=True)
class Tool:
    """The tool in processes of its own (huggingface_hub reads its settings when it is imported), with one cache."""

    endpoint: str
    home: Path

    def __call__(self, *args: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
        settings = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "sm70_convert.cli", *map(str, args)],
            env=clean | settings | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def document(self, *args: object, code: int = 0, **environment: str) -> Any:
        return json.loads(self(*args, "--json", code=code, **environment).stdout)

    def problem(self, *args: object, code: int = 3, **environment: str) -> dict[str, Any]:
        (problem,) = self.document(*args, code=code, **environment)["error"]["problems"]
        found: dict[str, Any] = problem
        return found


@pytest.fixture
def tool(hub: Hub, tmp_path: Path) -> Tool:
    return Tool(hub.url, tmp_path / "hf")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def manifest_source(out: Path) -> dict[str, str]:
    source: dict[str, str] = json.loads((out / "sm70/manifest.json").read_text())["source"]
    return source


def contents(folder: Path) -> Files:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def one_error_line(stderr: str) -> str:
    """The error of a command that printed nothing else but next steps."""
    first, *rest = stderr.splitlines()
    assert first.startswith("error: "), stderr
    assert all(line.startswith("next: ") for line in rest), stderr
    return first


# From the hub


def test_only_what_is_needed_is_fetched_and_the_folder_is_as_from_a_local_one(
    hub: Hub, tool: Tool, out: Path, tmp_path: Path
) -> None:
    needed = files_of(SHARDED)
    others = (
        "pytorch_model.bin",
        "model.gguf",
        "model.pt",
        "stray.safetensors",
        "original/consolidated.safetensors",
        "onnx/model.onnx",
        ".gitattributes",
    )
    hub.repos[REPO] = Repo({NEW: needed | dict.fromkeys(others, b"not needed")}, {"main": NEW})
    done = tool.document(REPO, "--out", out, "--tp-size", 2)
    assert done["status"] == "sealed"
    assert sorted(hub.fetched) == sorted((REPO, NEW, name) for name in needed)
    assert manifest_source(out) == {"repo": REPO, "commit": NEW}

    tool(SHARDED, "--out", tmp_path / "local", "--tp-size", 2)
    manifest = "sm70/manifest.json"
    fetched, local = contents(out), contents(tmp_path / "local")
    assert json.loads(local[manifest])["source"].keys() == {"config", "index"}
    assert {n: d for n, d in fetched.items() if n != manifest} == {n: d for n, d in local.items() if n != manifest}

    inspected = tool.document("inspect", out)
    assert inspected["source"] == {"repo": REPO, "commit": NEW}
    schema = json.loads((SCHEMAS / "inspect.schema.json").read_text())
    assert [e.message for e in Draft202012Validator(schema).iter_errors(inspected)] == []
    # The cache serves from now on, and the same bytes may come from a local folder.
    count = len(hub.fetched)
    tool("verify", out, "--source", REPO)
    tool("verify", out, "--source", SHARDED)
    assert len(hub.fetched) == count


def test_without_an_index_only_the_shards_at_the_top_are_fetched(hub: Hub, tool: Tool, out: Path) -> None:
    needed = files_of(AWQ)
    hub.repos[REPO] = Repo({NEW: needed | {"original/model.safetensors": b"not needed"}}, {"main": NEW})
    tool(REPO, "--out", out)
    assert sorted(name for _, _, name in hub.fetched) == sorted(needed)


def test_quiet_says_nothing_while_files_are_fetched(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(AWQ)}, {"main": NEW})
    done = tool("-q", REPO, "--out", out)
    assert (done.stdout, done.stderr) == ("", "")


def test_progress_and_warnings_of_the_library_stay_off_stderr(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(AWQ)}, {"main": NEW})
    assert tool(REPO, "--out", out, "--device", "cpu").stderr == ""


def test_a_revision_picks_a_branch_and_fetches_from_its_commit(hub: Hub, tool: Tool, out: Path) -> None:
    old = files_of(AWQ)
    changed = json.loads(old["config.json"]) | {"note": "newer"}
    new = old | {"config.json": json.dumps(changed).encode()}
    hub.repos[REPO] = Repo({OLD: old, NEW: new}, {"main": NEW, "work/old": OLD})
    tool(REPO, "--out", out, "--revision", "work/old")
    assert {commit for _, commit, _ in hub.fetched} == {OLD}
    assert manifest_source(out) == {"repo": REPO, "commit": OLD}
    assert "note" not in json.loads((out / "config.json").read_text())
    tool(REPO, "--out", out.with_name("by-commit"), "--revision", OLD)
    assert contents(out.with_name("by-commit")) == contents(out)
    tool(REPO, "--out", out.with_name("newer"))
    assert manifest_source(out.with_name("newer")) == {"repo": REPO, "commit": NEW}
    # The branch has moved since: not the source that this folder was made of.
    problem = tool.problem(REPO, "--out", out, "--tp-size", 2, code=5)
    assert problem["message"] == "belongs to another plan: source.commit differs"
    assert (problem["expected"], problem["actual"]) == (OLD, NEW)


def test_parts_of_a_hub_checkpoint_seal_from_the_cache(hub: Hub, tool: Tool, out: Path, tmp_path: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(SHARDED)}, {"main": NEW})
    tool(REPO, "--out", tmp_path / "whole")
    for layers in ("1", "2"):
        tool(REPO, "--out", out, "--layers", layers)
    tool("seal", out, HF_HUB_OFFLINE="1")
    assert contents(out) == contents(tmp_path / "whole")


def test_seal_and_verify_take_a_hub_id_as_source(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({OLD: files_of(AWQ)}, {"main": OLD})
    tool(REPO, "--out", out, "--layers", "0")
    shutil.rmtree(tool.home)
    moved = files_of(AWQ) | {"chat_template.jinja": b"newer"}
    hub.repos[REPO] = Repo({OLD: files_of(AWQ), NEW: moved}, {"main": NEW})
    # The files come again, with new mtimes: what counts for a hub id is its commit.
    tool("seal", out, "--source", REPO)
    assert manifest_source(out) == {"repo": REPO, "commit": OLD}
    tool("verify", out, "--source", REPO, "--revision", OLD)


# What can go wrong on a hub


def test_a_shard_that_the_hub_does_not_have_is_3(hub: Hub, tool: Tool, out: Path) -> None:
    files = files_of(SHARDED)
    name = "model-00003-of-00007.safetensors"
    del files[name]
    hub.repos[REPO] = Repo({NEW: files}, {"main": NEW})
    problem = tool.problem(REPO, "--out", out)
    assert (problem["file"], problem["message"]) == (name, "is missing")
    assert not out.exists()


def test_a_file_that_is_listed_but_lost_is_3_and_named(hub: Hub, tool: Tool, out: Path) -> None:
    name = "model-00003-of-00007.safetensors"
    hub.repos[REPO] = Repo({NEW: files_of(SHARDED)}, {"main": NEW}, lost=(name,))
    line = one_error_line(tool(REPO, "--out", out, code=3).stderr)
    assert line.startswith(f"error: {REPO}: cannot be fetched from the hub: ")
    assert name in line
    assert not out.exists()


def test_a_repository_without_a_config_is_3(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: {n: d for n, d in files_of(AWQ).items() if n != "config.json"}}, {"main": NEW})
    problem = tool.problem(REPO, "--out", out)
    assert (problem["file"], problem["message"]) == ("config.json", "is missing")


@pytest.mark.parametrize("status", [404, 401])
def test_an_unknown_id_is_3_in_one_clear_line(hub: Hub, tool: Tool, out: Path, status: int) -> None:
    if status == 401:  # so for who is not logged in, since it might be private
        hub.repos[REPO] = Repo({}, {}, (401, "RepoNotFound", "Invalid username or password."), hide_info=True)
    done = tool(REPO, "--out", out, code=3)
    line = one_error_line(done.stderr)
    assert line.startswith(f"error: {REPO}: cannot be fetched from the hub: ")
    assert "not found" in line.lower()
    assert "next: check the id, --revision and your access (hf auth login)" in done.stderr
    assert done.stdout == ""
    assert not out.exists()


@pytest.mark.parametrize("status", [403, 401])
@pytest.mark.parametrize("hide_info", [False, True])
def test_a_gated_id_is_3_in_one_clear_line(hub: Hub, tool: Tool, out: Path, status: int, hide_info: bool) -> None:
    message = f"Access to model {REPO} is restricted"
    refusal = (status, "GatedRepo", message)
    hub.repos[REPO] = Repo({NEW: files_of(AWQ)}, {"main": NEW}, refusal, hide_info=hide_info)
    done = tool(REPO, "--out", out, code=3)
    line = one_error_line(done.stderr)
    assert line.startswith(f"error: {REPO}: cannot be fetched from the hub: ")
    assert "gated" in line.lower() or "restricted" in line.lower()
    assert "next: check the id, --revision and your access (hf auth login)" in done.stderr
    assert hub.fetched == []


def test_an_unknown_revision_is_3_and_named(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(AWQ)}, {"main": NEW})
    line = one_error_line(tool(REPO, "--out", out, "--revision", "nightly", code=3).stderr)
    assert line.startswith(f"error: {REPO}: cannot be fetched from the hub: ")
    assert "revision" in line.lower()


def test_a_connection_that_ends_within_a_file_is_3(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(AWQ)}, {"main": NEW}, cut=("model.safetensors",))
    done = tool(REPO, "--out", out, code=3)
    assert done.stderr.splitlines()[-2].startswith(f"error: {REPO}: cannot be fetched from the hub: ")
    assert not out.exists()


@pytest.mark.parametrize("name", ["../../../../escaped.json", "a/../../../../escaped.json", "/ROOT/escaped.json"])
def test_no_name_of_a_hub_listing_leaves_the_cache(hub: Hub, tool: Tool, out: Path, tmp_path: Path, name: str) -> None:
    name = name.replace("/ROOT", str(tmp_path))
    hub.repos[REPO] = Repo({NEW: files_of(AWQ) | {name: b"{}"}}, {"main": NEW})
    line = one_error_line(tool(REPO, "--out", out, code=3).stderr)
    assert line.startswith(f"error: {REPO}: cannot be fetched from the hub: ")
    assert "escaped.json" in line
    assert [path for path in tmp_path.rglob("*") if path.name == "escaped.json"] == []
    assert not out.exists()


def test_what_is_neither_a_folder_nor_an_id_asks_no_hub(tool: Tool, out: Path, hub: Hub) -> None:
    for model in ("./org/model", "model", "a/b/c", "-/x"):
        args = ("plan", "--json", "--", model)
        (problem,) = json.loads(tool(*args, code=3).stdout)["error"]["problems"]
        assert problem["message"] == "is no folder, and no hub id such as org/name"
    assert hub.fetched == []


# Without a network


def test_the_cache_serves_offline(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(SHARDED)}, {"main": NEW})
    tool(REPO, "--out", out)
    offline = Tool("http://127.0.0.1:9", tool.home)
    again = out.with_name("again")
    offline(REPO, "--out", again, HF_HUB_OFFLINE="1")
    assert contents(again) == contents(out)
    assert offline.document(REPO, "--out", out, HF_HUB_OFFLINE="1")["status"] == "complete"


def test_offline_without_a_cache_is_3_and_says_so(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(AWQ)}, {"main": NEW})
    done = tool(REPO, "--out", out, code=3, HF_HUB_OFFLINE="1")
    assert done.stderr == (
        f"error: {REPO}: is not in the hub cache, and the hub cannot be reached\n"
        "next: check the network (or unset HF_HUB_OFFLINE), or give a local folder\n"
    )
    assert hub.fetched == []
    assert not out.exists()


def test_offline_with_half_a_cache_is_3(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(SHARDED)}, {"main": NEW})
    tool("plan", REPO)
    name = "model-00002-of-00007.safetensors"
    next((tool.home / "hub").rglob(name)).unlink()
    problem = tool.problem(REPO, "--out", out, HF_HUB_OFFLINE="1")
    assert problem["file"] in (REPO, name)
    assert not out.exists()


def test_a_hub_that_cannot_be_reached_is_3_in_one_line(tmp_path: Path, out: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        tool = Tool(f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path / "hf")
        done = tool(REPO, "--out", out, code=3)
    assert one_error_line(done.stderr) == f"error: {REPO}: is not in the hub cache, and the hub cannot be reached"


def test_the_symlinks_of_a_snapshot_are_followed(hub: Hub, tool: Tool, out: Path) -> None:
    hub.repos[REPO] = Repo({NEW: files_of(SHARDED)}, {"main": NEW})
    tool("plan", REPO)
    (snapshot,) = (tool.home / "hub").glob("models--*/snapshots/*")
    assert snapshot.name == NEW
    assert all(p.is_symlink() for p in snapshot.iterdir())
    for mode in ("copy", "hardlink"):
        made = out / mode
        tool(REPO, "--out", made, "--passthrough", mode)
        assert not any(p.is_symlink() for p in made.rglob("*"))
        tool("verify", made)
    shard = "model-00001-of-00007.safetensors"
    assert (out / "hardlink" / shard).samefile(snapshot / shard)
    assert contents(out / "hardlink") == contents(out / "copy")
    # The snapshot is as good as any folder when its path is given.
    tool(snapshot, "--out", out / "path")
    assert manifest_source(out / "path").keys() == {"config", "index"}
