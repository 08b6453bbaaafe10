"""Prints how many faults were tried, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fault_harness import TRIED

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each kind."""
    if TRIED:
        terminalreporter.section(f"faults tried: {TRIED.total()}")
        for kind, count in sorted(TRIED.items()):
            terminalreporter.line(f"{kind:<8} {count}")
