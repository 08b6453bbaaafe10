"""JSON from strangers: size limits, no duplicate keys, no surprises; and the one canonical form that this tool writes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from sm70_convert.errors import CheckpointError, Problem, Sm70Error

# A document that is read whole. The memory that it takes goes by its values, up to 240 bytes each, not by its size.
MAX_VALUES = 500_000
MAX_DEPTH = 100
# An object that is read member by member: 48 layers of 512 experts of 12 tensors are 300,000 members of 25 MB of keys.
MAX_MEMBERS = 400_000
MAX_KEYS = 32_000_000
MAX_VALUE = 65_536
_SPACE = re.compile(r"[ \t\n\r]*")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def _integer(digits: str) -> float:
    """Other readers take -0 for a float."""
    return -0.0 if digits == "-0" else int(digits)


_DECODER: Any = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_int=_integer)
_FAST: Any = json.JSONDecoder(object_pairs_hook=_no_duplicates)  # for where there is no -0


def load_object(data: bytes, file: str, *, error: type[Sm70Error] = CheckpointError) -> dict[str, Any]:
    """`data` as one JSON object. Raises `error`, naming `file`, for anything else, and for what would fill the memory."""
    values = sum(map(data.count, (b",", b"[", b"{")))  # not fewer than there are
    if values > MAX_VALUES:
        raise error(Problem("has too many values", file=file, expected=f"at most {MAX_VALUES}", actual=str(values)))
    try:
        value = _DECODER.decode(data.decode("utf-8"))
        _check(value)
    except (ValueError, RecursionError) as exc:
        raise _invalid(exc, file, error) from None
    if not isinstance(value, dict):
        raise error(Problem("not a JSON object", file=file, expected="an object", actual=type(value).__name__))
    return value


def _invalid(exc: Exception, file: str, error: type[Sm70Error]) -> Sm70Error:
    reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
    return error(Problem(f"not valid JSON: {reason}", file=file))


def _check(value: Any) -> None:
    """Raises UnicodeEncodeError for a lone surrogate, which UTF-8 cannot hold, and RecursionError over the depth limit."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.isascii() or item.encode()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                below += item
                below += item.values()
        if not below:
            return
        level = below
    raise RecursionError


def has_form(value: Any, form: Any) -> bool:
    """Whether `value` is as `form` says: a type, exactly (True is no int), or a function that is true of it; [form]: a list;
    {key: form}: an object of exactly these keys; {str: form}: of any keys.
    """
    if isinstance(form, type):
        return type(value) is form
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(v, form[0]) for v in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        if str in form:
            return all(has_form(v, form[str]) for v in value.values())
        return value.keys() == form.keys() and all(has_form(value[k], f) for k, f in form.items())
    return bool(form(value))


class ObjectReader:
    """One JSON object, read member by member from UTF-8 that comes in pieces, so that no document ever stands in memory.

    Its errors are of the kind `error` and name `file`.
    """

    def __init__(self, pieces: Iterable[bytes], file: str, *, error: type[Sm70Error] = CheckpointError) -> None:
        self._pieces = iter(pieces)
        self._file = file
        self._error = error
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text = ""  # a window
        self._before = 0  # characters before it
        self._at = 0
        self._ended = False

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here. Each one's value must be taken, by value() or members(), before the next.

        Raises an error for anything but an object, and over MAX_MEMBERS or MAX_KEYS. Duplicates are for the caller to refuse.
        """
        if self.next() and self._text[self._at] in '["-0123456789tfn':
            raise self._error(
                Problem("not a JSON object", file=self._file, expected="an object", actual="another value")
            )
        self._take("{")
        if self.next() == "}":
            self._at += 1
            return
        members = characters = 0
        while True:
            self.next()
            key = self._key()
            members += 1
            characters += len(key) if key.isascii() else 4 * len(key)  # as they may take in memory
            if members > MAX_MEMBERS:
                raise self._over("number of members in one object", MAX_MEMBERS)
            if characters > MAX_KEYS:
                raise self._over("size of all keys of one object", MAX_KEYS)
            self._take(":")
            yield key
            if self.next() == "}":
                self._at += 1
                return
            self._take(",")

    def value(self, what: str, *, limit: int = MAX_VALUE, tensor: str | None = None) -> Any:
        """The value that begins here. Raises an error, naming `what` and `tensor`, over `limit` characters."""
        self.next()
        self._fill(limit)
        start = self._at
        try:
            value, self._at = _FAST.scan_once(self._text, start)
            if self._text.find("-0", start, self._at) >= 0:
                value, self._at = _DECODER.scan_once(self._text, start)
            if self._text.find("\\", start, self._at) >= 0:
                _check(value)
        except StopIteration as exc:  # so the scanner says that a value was expected
            raise self._unread("Expecting value", exc.value, what, limit, tensor) from None
        except json.JSONDecodeError as exc:
            raise self._unread(exc.msg, exc.pos, what, limit, tensor) from None
        except (ValueError, RecursionError) as exc:
            raise _invalid(exc, self._file, self._error) from None
        if self._at - start > limit:
            raise self._over(what, limit, tensor)
        return value

    def next(self) -> str:
        """The next character that is no space, or nothing at the end; it is not taken."""
        here = self._text[self._at : self._at + 1]
        if here not in " \t\n\r":
            return here
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None  # noqa: S101 - it matches nothing, too
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill(1)

    def end(self) -> None:
        """Raises an error unless nothing follows."""
        if self.next():
            raise self.invalid("Extra data")

    def invalid(self, reason: str, at: int | None = None) -> Sm70Error:
        """The error for a document that is not what it must be, here or at a place in the window."""
        at = self._before + (self._at if at is None else at)
        return self._error(Problem(f"not valid JSON: {reason} (char {at})", file=self._file))

    def duplicate(self, key: str) -> Sm70Error:
        """The error for a key that came before."""
        return self._error(Problem(f"not valid JSON: duplicate key {key!r}", file=self._file))

    def _key(self) -> str:
        self._fill(MAX_VALUE)
        if self._text[self._at : self._at + 1] != '"':
            raise self.invalid("Expecting property name enclosed in double quotes")
        start = self._at
        try:
            key: str
            key, self._at = scanstring(self._text, start + 1, True)
            key.isascii() or key.encode()
        except json.JSONDecodeError as exc:
            raise self._unread(exc.msg, exc.pos, "a key", MAX_VALUE) from None
        except ValueError as exc:
            raise _invalid(exc, self._file, self._error) from None
        if self._at - start > MAX_VALUE:
            raise self._over("a key", MAX_VALUE)
        return key

    def _take(self, character: str) -> None:
        if self.next() != character:
            raise self.invalid(f"Expecting {character!r}")
        self._at += 1

    def _unread(self, reason: str, at: int, what: str, limit: int, tensor: str | None = None) -> Sm70Error:
        """The error for a failure at a place in the window: what was read is invalid, or too long for the window.

        Where the window's end cuts an escape or a word, that is at most 12 characters before.
        """
        if not self._ended and (reason.startswith("Unterminated") or at > len(self._text) - 16):
            return self._over(what, limit, tensor)
        return self.invalid(reason, at)

    def _over(self, what: str, limit: int, tensor: str | None = None) -> Sm70Error:
        problem = Problem(f"{what} is over the limit", tensor, self._file, expected=f"at most {limit}", actual="more")
        return self._error(problem)

    def _fill(self, ahead: int) -> None:
        """Makes the window reach `ahead` characters from here, if there are as many."""
        have = len(self._text) - self._at
        if have >= ahead or self._ended:
            return
        parts = [self._text[self._at :]]
        self._before += self._at
        self._at = 0
        while have < ahead and not self._ended:
            piece = next(self._pieces, b"")
            self._ended = not piece
            try:
                parts.append(self._decode(piece, self._ended))
            except UnicodeDecodeError as exc:
                raise self.invalid(f"not UTF-8, {exc.reason}", have) from None
            have += len(parts[-1])
        self._text = "".join(parts)


def canonical(value: Any) -> bytes:
    """The one form of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def pretty(value: Any, *, sort_keys: bool = True) -> bytes:
    """The same for people: one key a line, a newline at the end."""
    return (json.dumps(value, sort_keys=sort_keys, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )
