"""A runtime as a few files: enough of vllm for `env --check`, and a server that answers for the acceptance script."""

from __future__ import annotations

from pathlib import Path

# What tells one kind from another, and the settings that its envs.py knows.
MODULES = {"stock": (), "1cat": ("_sm70_ops",), "revolta": ("_sm70_ops", "revolta_profile")}
NEWER_SETTINGS = ("VLLM_SM70_AWQ_MOE_COMPACT_METADATA", "VLLM_SM70_AWQ_MOE_INT4_ZERO")

SERVER = '''
"""Records, serves and answers as far as the acceptance script looks; ANSWERS changes what is said."""
import argparse, json, os, socketserver, sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from sm70_convert.manifest import read_manifest
from sm70_convert.recorded import records_of, write_record

parser = argparse.ArgumentParser()
for name in ("model", "served-model-name", "host", "load-format", "model-loader-extra-config", "kernel-config"):
    parser.add_argument("--" + name, default="")
parser.add_argument("--port", type=int)
parser.add_argument("--tensor-parallel-size", type=int)
options = parser.parse_args()
prepared = options.load_format == "sm70_prepared"
with open(os.environ["STARTS"], "a") as starts:
    print(json.dumps(sys.argv[1:]), file=starts)
if options.load_format == "sm70_record":
    target = Path(json.loads(options.model_loader_extra_config)["record_hashes"])
    for record in records_of(read_manifest(Path(os.environ["PREPARED"])), "-"):
        if record.tp_size == options.tensor_parallel_size:
            if os.environ.get("ANSWERS") == "other bits":
                entry = record.layers[min(record.layers)]
                entry.tensors["w2_tm_weight"] = "0" * 64
            write_record(target, record)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == options.served_model_name and body["temperature"] == 0, body
        words = body["prompt"].split()[:3]
        if os.environ.get("ANSWERS") == "other tokens" and prepared:
            words[-1] += "!"
        if os.environ.get("ANSWERS") == "unsteady":
            words.append(str(os.getpid()))
        logprobs = {"tokens": words, "token_logprobs": [-0.5] * len(words)}
        self.reply(json.dumps({"choices": [{"logprobs": logprobs, "finish_reason": "stop"}]}).encode())

    def reply(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer((options.host, options.port), Handler).serve_forever()
'''

NVIDIA_SMI = """#!/bin/sh
case "$*" in *-lms*) ;; *) echo "a table"; exit 0 ;; esac
echo "0, 100"; echo "1, 900"; echo "0, 300"; echo "1, 200"
exec sleep 600
"""


def make_runtime(folder: Path, kind: str, *, settings: tuple[str, ...] = NEWER_SETTINGS, plugin: bool = True) -> Path:
    """A folder for sys.path that holds a vllm of this kind, and the plugin's entry point."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    for module in ("__init__", *MODULES[kind]):
        (package / f"{module}.py").touch()
    (package / "envs.py").write_text("".join(f"{name}: bool\n" for name in settings))
    server = package / "entrypoints" / "openai"
    server.mkdir(parents=True)
    for path in (package / "entrypoints" / "__init__.py", server / "__init__.py"):
        path.touch()
    (server / "api_server.py").write_text(SERVER)
    if plugin:
        about = folder / "fake_plugin-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nsm70_prepared = nowhere:register\n")
    return folder
