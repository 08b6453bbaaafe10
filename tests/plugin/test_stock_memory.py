"""What a load takes over what it leaves in use, on layers of more than 50 MB: from banks, and converting at load."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from stock_run import convert, options, require_stock_vllm, start

from synthetic import Synthetic, write_checkpoint

SPEC = Synthetic("awq", layers=4, experts=64, hidden=1024, intermediate=512, group_size=64, top_k=2)


def test_transient_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below 5% of the banks' bytes from a prepared folder; converting at load takes many times that."""
    require_stock_vllm()
    source = tmp_path / "source"
    write_checkpoint(source, SPEC)
    folder = convert(source, tmp_path / "prepared", 1)
    sizes = [path.stat().st_size for path in (folder / "sm70/tp1/rank0").iterdir()]
    assert len(sizes) == 4
    assert min(sizes) > 50e6

    transient = {}
    arms = {
        folder: {"load_format": "sm70_prepared"},
        source: {"load_format": "sm70_load_time", "quantization": "sm70_load_time"},
    }
    for model, how in arms.items():
        engine = options(dtype="float16", skip_tokenizer_init=True, **how)
        result, log = start(tmp_path, model, engine, repeats=0)
        assert result is not None, log[-4000:]
        (found,) = re.findall(r"transient memory of the whole load ([0-9.]+) MiB", log)
        transient[model] = float(found) * 2**20 / sum(sizes)
    shares = f"prepared {transient[folder]:.1%} of the banks' bytes, converted at load {transient[source]:.1%}"
    with capsys.disabled():
        sys.stdout.write(f"\ntransient memory of a load: {shares}\n")
    assert transient[folder] < 0.05
    assert transient[source] > 0.2
