"""A MODEL as a folder: a local one as it is, or a hub id through huggingface_hub, with only the files that are needed."""

from __future__ import annotations

import re
from pathlib import Path

from sm70_convert.checkpoint import INDEX, Checkpoint, open_checkpoint, parse_index, read_small
from sm70_convert.errors import CheckpointError, Problem, UsageError

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


def resolve(model: str, revision: str | None = None) -> Checkpoint:
    """Opens MODEL. Raises CheckpointError if it is neither a folder nor to be had from the hub (or its cache, offline)."""
    folder = Path(model)
    if folder.exists():
        if revision is not None:
            raise UsageError(Problem("--revision is for hub ids, but this is a local path", file=model))
        return open_checkpoint(folder)
    if not _REPO_ID.fullmatch(model):
        raise CheckpointError(Problem("is no folder, and no hub id such as org/name", file=model))
    snapshot = _download(model, revision)
    return open_checkpoint(snapshot, repo=model, commit=snapshot.name)


def _download(repo: str, revision: str | None) -> Path:
    """The snapshot folder of `repo`: configuration and index first, then the shards that the index names."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(repo, revision=revision, allow_patterns=_SMALL_FILES))
        # From here on the commit is fixed, whatever is pushed meanwhile.
        shards = _shards(snapshot)
        return Path(snapshot_download(repo, revision=snapshot.name, allow_patterns=[*_SMALL_FILES, *shards]))
    except LocalEntryNotFoundError as exc:
        hint = "check the network (or unset HF_HUB_OFFLINE), or give a local folder"
        raise CheckpointError(
            Problem("is not in the hub cache, and the hub cannot be reached", file=repo, hint=hint)
        ) from exc
    except (HfHubHTTPError, HFValidationError, OSError) as exc:
        reason = str(exc).strip().splitlines()[0]
        hint = "check the id, --revision and your access (hf auth login)"
        raise CheckpointError(Problem(f"cannot be fetched from the hub: {reason}", file=repo, hint=hint)) from exc


def _shards(snapshot: Path) -> list[str]:
    if (snapshot / INDEX).is_file():
        return sorted(parse_index(read_small(snapshot / INDEX, INDEX)))
    return ["*.safetensors"]
