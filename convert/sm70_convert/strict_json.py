"""JSON from strangers: size limits, no duplicate keys, no surprises; and the one canonical form that this tool writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sm70_convert.errors import CheckpointError, Problem, Sm70Error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def load_object(
    data: bytes,
    file: str,
    *,
    error: type[Sm70Error] = CheckpointError,
    compact: Callable[[dict[str, Any]], Any] = lambda value: value,
) -> dict[str, Any]:
    """`data` as one JSON object. Raises `error`, naming `file`, for anything else.

    compact: what to keep of each object, applied while reading, so that a large document never stands whole in memory.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: compact(_no_duplicates(pairs)),
            # Other readers take -0 for a float; only where it can occur, since a function here is slow.
            parse_int=(lambda text: -0.0 if text == "-0" else int(text)) if b"-0" in data else None,
        )
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except (ValueError, RecursionError) as exc:
        reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise error(Problem(f"not valid JSON: {reason}", file=file)) from None
    if not isinstance(value, dict):
        raise error(Problem("not a JSON object", file=file, expected="an object", actual=type(value).__name__))
    return value


def canonical(value: Any) -> bytes:
    """The one form of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def pretty(value: Any, *, sort_keys: bool = True) -> bytes:
    """The same for people: one key a line, a newline at the end."""
    return (json.dumps(value, sort_keys=sort_keys, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )
