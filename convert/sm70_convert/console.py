"""The one module that prints: results for people or as JSON on stdout; progress, warnings and errors on stderr."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click

from sm70_convert.errors import Sm70Error, printable


def human_bytes(count: float) -> str:
    """A number of bytes in powers of 1000, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def human_seconds(seconds: float) -> str:
    """A duration with a unit that fits it."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@dataclass
class Console:
    """How to speak: as_json puts one JSON document on stdout; quiet drops all but results that were asked for and errors."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: bool | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def shows_progress(self) -> bool:
        """Whether there is a terminal to draw a bar on, and somebody who wants one."""
        return not (self.quiet or self.as_json) and sys.stderr.isatty()

    def result(self, document: dict[str, Any], rows: Sequence[tuple[str, str]], *, essential: bool = True) -> None:
        """Prints a command's outcome: `document` as JSON, or `rows` as a two-column table."""
        if self.as_json:
            click.echo(json.dumps(document, indent=2, sort_keys=True))
        elif essential or not self.quiet:
            width = max((len(name) for name, _ in rows), default=0)
            for name, value in rows:
                click.echo(
                    f"{click.style(f'{printable(name):<{width}}', bold=True)}  {printable(value)}".rstrip(),
                    color=self.color,
                )

    def text(self, text: str) -> None:
        """Prints a text that was asked for, as it is."""
        click.echo(text, nl=False)

    def warn(self, text: str) -> None:
        """A line on stderr for something that is not an error."""
        if not self.quiet:
            click.echo(f"{click.style('warning', fg='yellow')}: {printable(text)}", err=True, color=self.color)

    def note(self, text: str) -> None:
        """A line on stderr for people, about something that was decided for them."""
        if not (self.quiet or self.as_json):
            click.echo(printable(text), err=True)

    def detail(self, text: str) -> None:
        """A line on stderr with --verbose."""
        if self.verbose:
            click.echo(printable(text), err=True)

    def error(self, error: Sm70Error) -> None:
        """An error for people on stderr, or as JSON on stdout."""
        if self.as_json:
            click.echo(json.dumps({"error": error.as_json()}, indent=2, sort_keys=True))
            return
        for line in error.lines():
            head, _, rest = line.partition(": ")
            colors = {"error": "red", "next": "green"}
            styled = f"{click.style(head, fg=colors[head], bold=True)}: {rest}" if head in colors else line
            click.echo(styled, err=True, color=self.color)

    def traceback(self) -> None:
        """The traceback of the exception that is being handled, on stderr."""
        for line in traceback.format_exc().splitlines():
            click.echo(printable(line), err=True)

    @contextmanager
    def progress(
        self, total_bytes: int, layers: int, what: str
    ) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
        """A bar of bytes, rate and layers on stderr; silent off a terminal. Gives (bytes done, layer done)."""
        if not self.shows_progress:  # a disabled bar would still start tqdm's thread
            yield (lambda _: None), (lambda layer: self.detail(f"layer {layer} done"))
            return
        from tqdm import tqdm

        done = 0
        with tqdm(
            total=total_bytes,
            unit="B",
            unit_scale=True,
            desc=what,
            leave=False,
            dynamic_ncols=True,
        ) as bar:

            def layer_done(layer: int) -> None:
                nonlocal done
                done += 1
                bar.set_postfix_str(f"layer {done}/{layers}")
                self.detail(f"layer {layer} done")

            yield bar.update, layer_done
