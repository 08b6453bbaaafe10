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
        value = _loads(data.decode("utf-8"), compact)
    except (ValueError, RecursionError) as exc:
        reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise error(Problem(f"not valid JSON: {reason}", file=file)) from None
    if not isinstance(value, dict):
        raise error(Problem("not a JSON object", file=file, expected="an object", actual=type(value).__name__))
    return value


def _loads(text: str, compact: Callable[[dict[str, Any]], Any]) -> Any:
    """Raises ValueError for a duplicate key, a lone surrogate, or what json refuses.

    The json module shows duplicate keys only as lists of pairs, which take more memory than all the rest. Where nothing is
    escaped, each string has two quotes, so that counting them shows whether a key was lost.
    """
    strings = 0

    def take(fields: dict[str, Any]) -> Any:
        nonlocal strings
        strings += len(fields) + sum(map(_strings, fields.values()))
        return compact(fields)

    # Other readers take -0 for a float; only where it can occur, since a function here is slow.
    parse_int = (lambda digits: -0.0 if digits == "-0" else int(digits)) if "-0" in text else None
    if "\\" not in text:
        value = json.loads(text, object_hook=take, parse_int=parse_int)
        if not isinstance(value, (dict, tuple)) or text.count('"') == 2 * strings:
            return value
    value = json.loads(text, object_pairs_hook=lambda pairs: compact(_no_duplicates(pairs)), parse_int=parse_int)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    return value


def _strings(value: Any) -> int:
    """Strings in a value, without those of the objects in it."""
    if isinstance(value, list):
        return sum(map(_strings, value))
    return int(isinstance(value, str))


def canonical(value: Any) -> bytes:
    """The one form of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def pretty(value: Any, *, sort_keys: bool = True) -> bytes:
    """The same for people: one key a line, a newline at the end."""
    return (json.dumps(value, sort_keys=sort_keys, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )
