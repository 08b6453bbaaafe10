"""What the fuzzer of tests/fuzz found worth keeping, read again: no input ends in anything but a reading or a refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
sys.path.insert(0, str(FUZZ))
from target import READERS, target  # noqa: E402

CORPUS = sorted((FUZZ / "corpus").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_an_input_of_the_corpus_is_read_or_refused(path: Path) -> None:
    assert target(path.read_bytes())


def test_the_corpus_reaches_every_reader_both_ways_and_is_small() -> None:
    inputs = [path.read_bytes() for path in CORPUS]
    assert {(data[0] % len(READERS), target(data) == "read") for data in inputs} == {
        (reader, read) for reader in range(len(READERS)) for read in (True, False)
    }
    assert sum(map(len, inputs)) < 200_000
