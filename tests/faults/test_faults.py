"""Every I/O call of the tool fails once, in every way it can: what is said, what is left, and what the next run makes of it.

A run is repeated once for each of its calls and each kind of fault. The harness counts the calls by the lines that make them,
and the last test holds these against all I/O calls in the source: a new one that no scenario comes to is named there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_harness import HIT, Runner, Trial
from fault_scenarios import SCENARIOS, Scenario, small
from fault_sites import EXCLUDED, PACKAGE, Site, excluded, sites, uncovered

RUNNERS = 2


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], list[Runner]]]:
    """Processes that have everything imported and have run every command once; a fork of one without torch is quicker."""
    root = tmp_path_factory.mktemp("runners")
    made = small()
    made.others = {}
    model = str(made.write(root / "model"))
    found: dict[bool, list[Runner]] = {}

    def start(number: int, torch: bool) -> Runner:
        folder = root / f"{number}{'-torch' * torch}"
        runner = Runner(folder, ("torch", "sm70_kernels.reference") if torch else ())
        out = str(folder / "out")
        source, kernel = (["--source", model], ["--kernel", "torch"]) if torch else ([], [])
        commands = [["verify", out, *source], ["plan", model], ["inspect", out], ["seal", out]]
        runner.send({"warm": [[model, "--out", out, *kernel], *commands]})
        return runner

    def runners(torch: bool) -> list[Runner]:
        if torch not in found:
            found[torch] = [start(number, torch) for number in range(RUNNERS)]
        return found[torch]

    yield runners
    for runner in [r for some in found.values() for r in some]:
        runner.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_every_fault_is_told_seals_nothing_and_is_mended_by_the_next_run(
    scenario: Scenario, started: Callable[[bool], list[Runner]], tmp_path: Path
) -> None:
    runners = started(scenario.torch)

    def some(number: int) -> list[str]:
        trial = Trial(scenario, runners[number], tmp_path / str(number))
        mine = [fault for i, fault in enumerate(trial.faults()) if i % RUNNERS == number]
        return [wrong for call, kind in mine for wrong in trial.attempt(call, kind)]

    with ThreadPoolExecutor(RUNNERS) as pool:
        wrong = [line for lines in pool.map(some, range(RUNNERS)) for line in lines]
    shutil.rmtree(tmp_path)
    assert wrong == []


def test_every_io_call_of_the_source_was_disturbed(request: pytest.FixtureRequest) -> None:
    tried = {item.name for item in request.session.items}
    if not all(any(f"[{s.name}]" in name for name in tried) for s in SCENARIOS):
        pytest.skip("only some of the scenarios were run")
    assert uncovered(HIT) == []


def test_the_list_of_what_is_not_disturbed_is_not_too_long() -> None:
    names = {site.file for site in sites() if excluded(site)}
    assert all(any(name.startswith(e.split(":")[0]) for name in names) for e in EXCLUDED)


def test_a_new_io_call_would_be_named() -> None:
    """The check itself: of all calls, none is passed over when nothing was hit."""
    assert len(uncovered(set())) > 100
    one = next(site for site in sites() if site.file == "bank.py" and site.call == "os.pwrite")
    assert str(one) in uncovered(set())
    assert str(one) not in uncovered({f"bank.py:{one.last} write_at"})
    assert str(Site("bank.py", one.first, one.last, "os.pwrite")) == f"bank.py:{one.first} os.pwrite"
    assert (PACKAGE / "bank.py").is_file()
