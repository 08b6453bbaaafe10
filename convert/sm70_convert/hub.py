"""A MODEL as a folder: a local one as it is, or a hub id through huggingface_hub, with only the files that are needed."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from sm70_convert.checkpoint import INDEX, Checkpoint, open_checkpoint, parse_index, read_small, reading
from sm70_convert.errors import CheckpointError, Problem, Sm70Error, UsageError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# Weights in other forms are never needed.
_SMALL_FILES = [
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.py",
    "*.yaml",
    "*.yml",
    "*.csv",
    "LICENSE*",
    "NOTICE*",
]


def resolve(model: str, revision: str | None = None, *, progress: bool = False) -> Checkpoint:
    """Opens MODEL; progress: show what is fetched.

    Raises CheckpointError if it is neither a folder nor to be had from the hub (or its cache, offline).
    """
    folder = Path(model)
    if _is_local(folder):
        if revision is not None:
            raise UsageError(Problem("--revision is for hub ids, but this is a local path", file=model))
        return open_checkpoint(folder)
    if not _REPO_ID.fullmatch(model):
        raise CheckpointError(Problem("is no folder, and no hub id such as org/name", file=model))
    snapshot = _download(model, revision, progress)
    return open_checkpoint(snapshot, repo=model, commit=snapshot.name)


def _is_local(folder: Path) -> bool:
    with reading(str(folder)):
        try:
            return folder.exists()
        except OSError as exc:
            if exc.errno == errno.ENAMETOOLONG:
                return False
            raise


def _download(repo: str, revision: str | None, progress: bool) -> Path:
    """The snapshot folder of `repo`: configuration and index first, then the shards that the index names."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.logging import get_logger
    from huggingface_hub.utils.tqdm import disable_progress_bars

    get_logger("huggingface_hub").setLevel("ERROR")
    if not progress:
        disable_progress_bars()
    try:
        snapshot = Path(snapshot_download(repo, revision=revision, allow_patterns=_SMALL_FILES))
        shards = _shards(snapshot)
        # From here on the commit is fixed, whatever is pushed meanwhile.
        patterns = [*_SMALL_FILES, *(shards or ["*.safetensors"])]
        ignored = None if shards else ["*/*.safetensors"]
        return Path(snapshot_download(repo, revision=snapshot.name, allow_patterns=patterns, ignore_patterns=ignored))
    except LocalEntryNotFoundError as exc:
        hint = "check the network (or unset HF_HUB_OFFLINE), or give a local folder"
        raise CheckpointError(
            Problem("is not in the hub cache, and the hub cannot be reached", file=repo, hint=hint)
        ) from exc
    except Sm70Error:
        raise
    except Exception as exc:
        hint = "check the id, --revision and your access (hf auth login)"
        message = f"cannot be fetched from the hub: {_reason(exc, revision)}"
        raise CheckpointError(Problem(message, file=repo, hint=hint)) from exc


def _reason(exc: Exception, revision: str | None) -> str:
    """One line for what the hub answered."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(exc, GatedRepoError):
        return "it is gated, and this login has no access"
    if isinstance(exc, RepositoryNotFoundError):
        return "not found, or private"
    if isinstance(exc, RevisionNotFoundError):
        return f"no revision {revision or 'main'}"
    if isinstance(exc, EntryNotFoundError):
        url = getattr(getattr(exc, "response", None), "url", "")
        return f"file not found: {str(url).rsplit('/', 1)[-1] or exc}"
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__


def _shards(snapshot: Path) -> list[str]:
    """The shards that the index names; none without an index."""
    if (snapshot / INDEX).is_file():
        return sorted(parse_index(read_small(snapshot / INDEX, INDEX)))
    return []
