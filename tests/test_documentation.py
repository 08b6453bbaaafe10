"""The tests that the documentation names exist."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
FUNCTIONS = {
    path.name: {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}
    for path in TESTS.rglob("test_*.py")
}


def named(text: str, home: str | None) -> list[tuple[str | None, str]]:
    """Each test that a document's line names, with the file named before it (`home`: where none is); a file alone has no test."""
    found, file = [], home
    for token in re.findall(r"test_[a-z0-9_*…]+(?:\.py)?", text):
        if token.endswith(".py"):
            file = token
            found.append((file, "*"))
        else:
            found.append((file, token.replace("…", "*")))
    return found


@pytest.mark.parametrize(("document", "home"), [("reliability.md", None), ("security.md", "test_security.py")])
def test_the_tests_that_a_document_names_exist(document: str, home: str | None) -> None:
    tests = [test for line in (DOCS / document).read_text().splitlines() for test in named(line, home)]
    assert len(tests) > 20
    missing = [
        (file, pattern)
        for file, pattern in tests
        if not any(
            fnmatchcase(name, pattern)
            for name in (FUNCTIONS.get(file, ()) if file else set().union(*FUNCTIONS.values()))
        )
    ]
    assert missing == []
