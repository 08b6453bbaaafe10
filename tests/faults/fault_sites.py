"""Every I/O call that the tool makes, read off its source."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import sm70_convert

PACKAGE = Path(sm70_convert.__file__).parent
# Functions of os and methods of pathlib and of files that come to a call of the system.
CALLS = {
    "access", "chmod", "close", "copy", "copy2", "copy_file_range", "copyfile", "copyfileobj", "copytree", "exists",
    "fdatasync", "fdopen", "flock", "flush", "fstat", "fsync", "ftruncate", "glob", "hardlink_to", "is_dir",
    "is_fifo", "is_file", "is_symlink", "iterdir", "lexists", "link", "listdir", "lockf", "lstat", "makedirs",
    "mkdir", "mmap", "move", "open", "posix_fadvise", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev",
    "read", "read_bytes", "read_text", "readlink", "readv", "remove", "removedirs", "rename", "renames", "rglob",
    "rmdir", "rmtree", "samefile", "scandir", "sendfile", "stat", "statvfs", "symlink", "symlink_to", "touch",
    "truncate", "unlink", "utime", "walk", "write", "write_bytes", "write_text", "writev",
}  # fmt: skip


class Site(NamedTuple):
    """One call in the source: its file, its first and last line, and how it is written."""

    file: str
    first: int
    last: int
    call: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.call}"


def is_io(node: ast.Call) -> bool:
    """Whether a call is one of the system's, by its name. Path.replace() has one argument, str.replace() two."""
    match node.func:
        case ast.Name("open"):
            return True
        case ast.Attribute(ast.Name("os"), "replace"):
            return True
        case ast.Attribute(_, "replace"):
            return len(node.args) == 1 and not node.keywords
        case ast.Attribute(_, name):
            return name in CALLS
    return False


def sites() -> list[Site]:
    """All I/O calls of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and is_io(node):
                file = path.relative_to(PACKAGE).as_posix()
                found.append(Site(file, node.lineno, node.end_lineno or node.lineno, ast.unparse(node.func)))
    return found


# What no scenario comes to, and why. Everything else must be disturbed, or lie on the way of another fault.
EXCLUDED = {
    "acceptance.py": "env --acceptance prints a file of the package",
    "environment.py": "env looks for packages, not for folders of ours",
    "runtime_check.py": "env --check alone",
    "hub.py:_shards": "the index in the hub's cache, which was just fetched; the same file is opened with the checkpoint",
    "__main__.py": "standard error where there is no memory; test_memory_and_disk.py",
    "cli.py": "the standard streams; test_cli.py closes and fills them",
    "ending.py": "standard output, likewise",
    "vllm_plugin/": "the runtime's process; see tests/plugin",
}


def excluded(site: Site) -> bool:
    """Whether the list above names the call."""
    if site.file == "hub.py":
        return site.call == "(snapshot / INDEX).is_file"
    return site.file in EXCLUDED or f"{site.file.split('/')[0]}/" in EXCLUDED


def uncovered(hit: set[str]) -> list[str]:
    """The calls of the package, not excluded, that no line in `hit` ("bank.py:154 commit") lies on."""
    lines = {tuple(place.split()[0].split(":")) for place in hit}
    return [
        str(site)
        for site in sites()
        if not excluded(site) and not any((site.file, str(line)) in lines for line in range(site.first, site.last + 1))
    ]
