"""The command line: parse, call, hand the result to the console. A command imports what it needs when it runs."""

from __future__ import annotations

import functools
import mmap
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sm70_convert import __version__
from sm70_convert.console import Console
from sm70_convert.devices import KERNELS
from sm70_convert.ending import as_error, fail, stoppable, without_overwrite
from sm70_convert.errors import Interrupted, OutputError, Problem, UsageError
from sm70_convert.layout import LAYOUT_NAMES, RUNTIMES
from sm70_convert.names import parse_ranges

if TYPE_CHECKING:
    from sm70_convert.plan import Options

_F = TypeVar("_F", bound=Callable[..., Any])
_NUMPY_BYTES = 100 << 20  # of address space, not of memory
_GLOBAL = re.compile(r"-[qv]+|--quiet|--verbose|--json|--no-color|--debug")


class _DefaultCommand(click.Group):
    """A group whose first command runs when none is named, and whose --help shows that command's options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        count = next((i for i, a in enumerate(args) if not _GLOBAL.fullmatch(a)), len(args))
        rest = args[count:]
        if rest and rest[0] not in self.commands and rest[0] not in ("--help", "-h", "--version"):
            rest = ["convert", *rest]
        if rest and rest[0] in self.commands:
            rest[1:1] = args[:count]
        return super().parse_args(ctx, rest)

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Runs the command line; a standard stream that is closed or full ends it without a traceback.

        With --json, click's own refusals are a document too.
        """
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        try:
            try:
                given = list(sys.argv[1:] if args is None else args)
                if "--json" not in given:
                    return super().main(given, *more, **extra)
                try:
                    sys.exit(super().main(given, *more, **{**extra, "standalone_mode": False}))
                except click.ClickException as exc:
                    fail(Console(as_json=True), UsageError(exc.format_message().partition("\n")[0]), debug=False)
                except click.Abort:
                    fail(Console(as_json=True), Interrupted("interrupted"), debug=False)
            finally:
                sys.stdout.flush()
        except OSError:
            # What is still buffered must not raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(OutputError.exit_code)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return ["MODEL --out DIR [OPTIONS]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Command.format_options(self.commands["convert"], ctx, formatter)
        self.format_commands(ctx, formatter)


def _jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _layers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else parse_ranges(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None


def _options(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def apply(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


_speaking = _options(
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
    click.option("-v", "--verbose", is_flag=True, help="Print each layer as it is done."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    click.option("--no-color", is_flag=True, help="No colours (NO_COLOR is honoured too)."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)
_planning = _options(
    click.option(
        "--tp-size",
        "tp_sizes",
        type=click.IntRange(1, 1024),
        multiple=True,
        help="Tensor-parallel size; repeat for several.",
    ),
    click.option(
        "--runtime",
        type=click.Choice(RUNTIMES),
        default="revolta",
        show_default=True,
        help="Whose defaults `auto` follows.",
    ),
    click.option(
        "--layout",
        type=click.Choice(["auto", *LAYOUT_NAMES]),
        default="auto",
        show_default=True,
        help="Form of the banks.",
    ),
    click.option(
        "--interleave",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Gate/up columns of w13.",
    ),
    click.option("--layers", callback=_layers, metavar="0-3,7", help="Only these layers: a part, closed with `seal`."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
)
_source_argument = click.argument("model", metavar="MODEL")
_folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
_jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=_jobs,
    show_default="the CPUs of this process",
    help="Workers.",
)
_passthrough_option = click.option(
    "--passthrough",
    type=click.Choice(["copy", "hardlink", "symlink"]),
    default="copy",
    show_default=True,
    help="How shards without experts get into DIR.",
)


@click.group(
    cls=_DefaultCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 bug, 2 usage, 3 checkpoint wrong or incomplete, 4 valid but not supported, 5 output, "
    "6 integrity, 7 device, 130 interrupted, 143 terminated.",
)
@click.version_option(__version__, prog_name="sm70-convert")
def main() -> None:
    """Prepare the experts of an AWQ or NVFP4 MoE checkpoint for Tesla V100 (SM70) runtimes, once and offline.

    MODEL is a folder or a hub id. The same command again resumes an interrupted run.
    """


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command its console, and turns every failure into its message and exit code."""

    @_speaking
    @functools.wraps(function)
    def run(*, quiet: bool, verbose: bool, as_json: bool, no_color: bool, debug: bool, **options: Any) -> None:
        color = False if no_color or os.environ.get("NO_COLOR") else None
        console = Console(as_json=as_json, quiet=quiet, verbose=verbose, color=color)
        with stoppable(console):
            try:
                # numpy's library ends the process itself where there is no memory for it.
                mmap.mmap(-1, _NUMPY_BYTES).close()
                function(console, **options)
            except BrokenPipeError:
                raise  # whoever read our output has gone
            except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - the last line: no traceback without --debug
                error = as_error(exc)
                if options.get("overwrite"):
                    error = without_overwrite(error)
                fail(console, error, debug)

    return run


@main.command(no_args_is_help=True)
@_source_argument
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to make.")
@_planning
@click.option("--device", default="auto", metavar="auto|cpu|cuda[:i]", show_default=True, help="Where to prepare.")
@click.option(
    "--kernel",
    type=click.Choice(["auto", *KERNELS]),
    default="auto",
    show_default=True,
    help="With what: native and triton run on a GPU, cpp and numpy on the CPU, torch (slow) on both.",
)
@_jobs_option
@click.option(
    "--hash",
    "hash_name",
    type=click.Choice(["blake3", "sha256"]),
    default="blake3",
    show_default=True,
    help="Digests.",
)
@_passthrough_option
@click.option("--allow-nonfinite", is_flag=True, help="Keep inf and NaN scales as the runtime would, and report them.")
@click.option("--overwrite", is_flag=True, help="Start over: remove what an earlier run left in DIR.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@_command
def convert(
    console: Console,
    model: str,
    out: Path,
    device: str,
    kernel: str,
    jobs: int,
    passthrough: str,
    allow_nonfinite: bool,
    overwrite: bool,
    dry_run: bool,
    revision: str | None,
    tp_sizes: tuple[int, ...],
    **choices: Any,
) -> None:
    """Prepare MODEL into DIR (the default command)."""
    from sm70_convert.hub import resolve
    from sm70_convert.kernel_choice import choose, settled, workers
    from sm70_convert.plan import build_plan

    choose(device, kernel)  # what is impossible for any checkpoint is said before one is fetched
    with resolve(model, revision, progress=console.shows_progress) as checkpoint:
        plan = build_plan(checkpoint, _plan_options(tp_sizes or (1,), **choices))
        choice = choose(device, kernel, plan.layout.name)
        # Only now the modules that need numpy: they take up the memory that the headers of a large checkpoint leave free.
        from sm70_convert.convert import run_plan
        from sm70_convert.describe import describe_plan, describe_summary
        from sm70_convert.estimate import check_room
        from sm70_convert.journal import refuse_overlap
        from sm70_convert.passthrough import passthrough_bytes

        refuse_overlap(plan, Path(os.path.realpath(out)))
        check_room(plan, out, passthrough)
        for warning in plan.warnings:
            console.warn(warning)
        if dry_run:
            console.result(*describe_plan(plan, model, out, passthrough))
            return
        choice = settled(choice)
        if device == "auto":
            console.note(str(choice))
        jobs, new_worker = workers(choice, jobs)
        total = sum(layer.source_bytes for layer in plan.layers if layer.layer in plan.selected)
        total += passthrough_bytes(plan, "copy") if plan.options.layers is None else 0
        with console.progress(total, len(plan.selected), "preparing") as (progress, layer_done):
            summary = run_plan(
                plan,
                out,
                jobs=jobs,
                new_worker=new_worker,
                passthrough=passthrough,
                allow_nonfinite=allow_nonfinite,
                overwrite=overwrite,
                progress=progress,
                layer_done=layer_done,
            )
        if summary.status == "complete":
            console.warn(
                f"nothing to do; of {model}'s weights only a sample was compared (verify --source compares all)"
            )
        console.result(*describe_summary(console, "convert", summary, plan, choice), essential=False)


def _plan_options(tp_sizes: tuple[int, ...], *, hash_name: str = "blake3", **choices: Any) -> Options:
    from sm70_convert.plan import Options

    return Options(tp_sizes=tuple(sorted(set(tp_sizes))), hash=hash_name, **choices)


@main.command()
@_source_argument
@_planning
@click.option(
    "--scales", is_flag=True, help="Read all scales too, and report every value that would be refused or noted."
)
@_command
def plan(
    console: Console,
    model: str,
    scales: bool,
    revision: str | None,
    tp_sizes: tuple[int, ...],
    **choices: Any,
) -> None:
    """Show what would be written, which TP sizes work, memory and time."""
    from dataclasses import replace

    from sm70_convert.describe import describe_plan
    from sm70_convert.estimate import check_all_scales
    from sm70_convert.hub import resolve
    from sm70_convert.plan import build_plan, in_order

    with resolve(model, revision, progress=console.shows_progress) as checkpoint:
        decided = build_plan(checkpoint, _plan_options(tp_sizes, **choices))
        for warning in decided.warnings:
            console.warn(warning)
        if scales:
            total = sum(layer.source_bytes for layer in decided.layers if layer.layer in decided.selected)
            with console.progress(total, len(decided.selected), "reading scales") as (progress, _):
                found = check_all_scales(decided, progress)
            decided = replace(decided, findings=in_order((*decided.findings, *found)))
        console.result(*describe_plan(decided, model, None, "copy"))


@main.command()
@_folder_argument
@click.option(
    "--source",
    metavar="MODEL",
    help="Prepare again from this checkpoint with the independent reference, and compare bits.",
)
@click.option("--sample", type=click.IntRange(1), metavar="K", help="With --source: only K experts a layer.")
@click.option("--revision", metavar="REV", help="Of --source, for a hub id.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="Compare with what a runtime recorded (--load-format sm70_record), or with another prepared folder; repeat for several.",
)
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only the banks of this rank.")
@click.option("--quick", is_flag=True, help="Sizes and presence only.")
@_jobs_option
@_command
def verify(
    console: Console,
    folder: Path,
    source: str | None,
    sample: int | None,
    revision: str | None,
    against: tuple[Path, ...],
    rank: int | None,
    quick: bool,
    jobs: int,
) -> None:
    """Check a prepared folder against its manifest, its source, and what a runtime prepared."""
    if source is None and (sample is not None or revision is not None):
        raise UsageError(Problem("--sample and --revision go with --source"))
    if source is not None and quick:
        raise UsageError(Problem("--quick and --source exclude each other"))
    from sm70_convert.describe import describe_verification
    from sm70_convert.hub import resolve
    from sm70_convert.journal import unfinished
    from sm70_convert.manifest import read_manifest
    from sm70_convert.recorded import compare_recorded
    from sm70_convert.verify import chosen_files, source_bytes, source_plan, verify_folder, verify_source

    manifest = read_manifest(folder)
    if unfinished(folder):
        console.warn("a run on this folder was stopped or is still going: what it has made so far is not verified")
    if rank is not None and rank >= max(manifest.tp_sizes):
        raise UsageError(Problem(f"--rank {rank}: this folder has TP sizes {', '.join(map(str, manifest.tp_sizes))}"))
    total = 0 if quick else sum(r.bytes for r in chosen_files(manifest, rank))
    with console.progress(total, len(manifest.layers), "verifying") as (progress, _):
        outcome = verify_folder(folder, manifest, quick=quick, rank=rank, jobs=jobs, progress=progress)
    outcome.raise_if_any()
    if source is not None:
        pinned = (
            manifest.identity["source"].get("commit") if source == manifest.identity["source"].get("repo") else None
        )
        with resolve(source, revision or pinned, progress=console.shows_progress) as checkpoint:
            plan = source_plan(manifest, checkpoint)
            total = source_bytes(plan, manifest, sample)
            with console.progress(total, len(manifest.layers), "preparing again") as (progress, layer_done):
                outcome = verify_source(
                    folder, manifest, plan, sample=sample, rank=rank, progress=progress, layer_done=layer_done
                )
        outcome.raise_if_any()
    if against:
        outcome = replace(outcome, against=compare_recorded(manifest, against, rank=rank))
    console.result(*describe_verification(folder, outcome), essential=False)


@main.command()
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@_command
def inspect(console: Console, path: Path) -> None:
    """Describe a checkpoint or a prepared folder from headers alone."""
    from sm70_convert.describe import describe_path

    document, rows = describe_path(path)
    console.result(document, rows)


@main.command()
@_folder_argument
@click.option("--source", metavar="MODEL", help="The checkpoint, where it no longer lies where the parts found it.")
@_passthrough_option
@_command
def seal(console: Console, folder: Path, source: str | None, passthrough: str) -> None:
    """Check that all parts made with --layers are there, then seal."""
    from sm70_convert.describe import describe_summary
    from sm70_convert.seal import seal as seal_folder
    from sm70_convert.seal import sealing_plan

    with sealing_plan(folder, source) as decided, console.progress(0, 0, "sealing") as (progress, _):
        summary = seal_folder(decided, folder, passthrough=passthrough, progress=progress)
    console.result(*describe_summary(console, "seal", summary, decided), essential=False)


@main.command()
@click.option(
    "--check",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Would the runtime of this environment take this prepared folder? Run it before a start of minutes.",
)
@click.option("--tp-size", type=click.IntRange(1, 1024), help="With --check: this TP size alone.")
@click.option(
    "--acceptance",
    is_flag=True,
    help="Print a shell script that proves, on V100s, a folder equal to a start from its checkpoint.",
)
@_command
def env(console: Console, folder: Path | None, tp_size: int | None, acceptance: bool) -> None:
    """Show versions, devices and kernels found; check a prepared folder for this environment."""
    if folder is None and tp_size is not None:
        raise UsageError(Problem("--tp-size goes with --check"))
    if acceptance:
        if folder is not None or console.as_json:
            raise UsageError(Problem("--acceptance prints a script, and goes with neither --check nor --json"))
        from sm70_convert.acceptance import acceptance_script

        console.text(acceptance_script())
        return
    from sm70_convert.environment import describe_environment
    from sm70_convert.kernel_choice import describe_kernels

    document, rows = describe_environment()
    kernels, kernel_rows = describe_kernels()
    document |= kernels
    rows += kernel_rows
    if folder is not None:
        from sm70_convert.runtime_check import check_folder

        taken = check_folder(folder, tp_size=tp_size)
        for warning in taken.warnings:
            console.warn(warning)
        document["check"] = taken.as_json()
        rows += taken.rows()
    console.result(document, rows)


if __name__ == "__main__":
    main()
