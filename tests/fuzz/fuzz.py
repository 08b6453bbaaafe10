"""`python tests/fuzz/fuzz.py NEW tests/fuzz/corpus [libFuzzer options]`: inputs that reach new code go to the folder NEW."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["sm70_convert", "json"]):
    from target import target


def run(data: bytes) -> None:
    """One input. What it gives is for the tests."""
    target(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
