"""What the whole suite shares: a line or two at the end of its summary."""

from __future__ import annotations

import pytest

BAD_INPUTS = ("test_bad_input_table.py", "test_bad_inputs.py", "test_security.py")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if count := bad_inputs_tried(terminalreporter):
        terminalreporter.write_line(f"bad inputs tried: {count}")


def bad_inputs_tried(reporter: pytest.TerminalReporter) -> int:
    reports = (*reporter.getreports("passed"), *reporter.getreports("failed"))
    return sum(r.when == "call" and r.nodeid.split("::")[0].endswith(BAD_INPUTS) for r in reports)
