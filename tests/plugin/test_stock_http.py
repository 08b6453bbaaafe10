"""The command of the README: the OpenAI server on a prepared folder."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from stock_run import DATA, convert, environment, require_stock_vllm
from test_stock_serving import AWQ_G64


def test_http_server(tmp_path: Path) -> None:
    """As a user would start it, eager mode and the small cache aside: it answers, and the answer ends by EOS."""
    require_stock_vllm()
    folder = convert(DATA / AWQ_G64.checkpoint, tmp_path / "prepared", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--load-format", "sm70_prepared", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", "128", "--kv-cache-memory-bytes", str(64 << 20)),
    ]
    env = environment(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0")
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log)
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(
                    {"model": str(folder), "prompt": AWQ_G64.prompts[0], "temperature": 0, "max_tokens": 32}
                ).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
                answer = json.load(response)
        finally:
            server.terminate()
            server.wait(timeout=30)
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop"]
    assert 1 < answer["usage"]["completion_tokens"] < 32
    assert log.read_text().count("sm70-convert: TP rank 0: ") == 1


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(360):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(log.read_text()[-4000:])
