"""Names, tracker and common.json of checkpoints on disk: replaced whole or not at all."""

# <root>/
#   latest_checkpointed_iteration.txt    the iteration to resume from; written last
#   iter_0000100/                        .metadata, *.distcp and common.json
#   iter_0000200.partial/                being written; removed by the next save
#   iter_0000100.replaced/               aside while a new iter_0000100 takes its place

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.json"
METADATA = ".metadata"
FORMAT_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the text is one line for the user."""


def iteration_directory(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def latest_iteration(directory_root: str | Path) -> int | None:
    """The iteration to resume from; None where nothing was saved."""
    root = Path(directory_root)
    try:
        text = (root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        if (root / METADATA).exists():
            raise CheckpointError(
                f"{root} is one iteration of a checkpoint: give the folder that holds it, "
                f"{root.absolute().parent}"
            ) from None
        return None
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{root / TRACKER} says {text[:40]!r}: write the number of an iter_* folder into it"
        )
    return int(text)


def find_checkpoint(directory_root: str | Path, iteration: int | None = None) -> Path | None:
    """The folder of `iteration`, or of the latest one; None where nothing was saved."""
    root = Path(directory_root)
    wanted = latest_iteration(root) if iteration is None else iteration
    if wanted is None:
        return None
    directory = iteration_directory(root, wanted)
    for candidate in (directory, _replaced(directory)):
        if candidate.is_dir():
            return candidate
    says = f"{TRACKER} names iteration {wanted}, but " if iteration is None else ""
    raise CheckpointError(f"{says}{directory} does not exist")


def read_common(directory_root: str | Path, iteration: int | None = None) -> dict[str, Any] | None:
    """What was saved beside the tensors; None where nothing was saved."""
    directory = find_checkpoint(directory_root, iteration)
    return common_of(directory) if directory else None


def common_of(directory: Path) -> dict[str, Any]:
    """What was saved beside the tensors in one iteration's folder."""
    path = directory / COMMON
    try:
        common = json.loads(path.read_text(encoding="utf-8"))
        version, _ = common["format_version"], common["iteration"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged ({describe(error)}): resume from another iteration"
        ) from None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format {version}, and this version reads formats up to "
            f"{FORMAT_VERSION}: use the version that wrote it, {common.get('versions')}"
        )
    return dict(common)


def begin_checkpoint(directory_root: str | Path, iteration: int) -> Path:
    """An empty folder to write `iteration` into; what crashed saves left behind is removed."""
    root = Path(directory_root)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob("iter_*.partial"):
        shutil.rmtree(leftover)
    directory = iteration_directory(root, iteration)
    partial = directory.with_name(f"{directory.name}.partial")
    partial.mkdir()
    return partial


def finish_checkpoint(partial: Path, iteration: int, common: Mapping[str, Any]) -> None:
    """Makes a written folder the latest checkpoint; until the last rename the old one is.

    All that may fill the disk is written before anything is renamed.
    """
    root = partial.parent
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    own = {"format_version": FORMAT_VERSION, "iteration": iteration, "versions": versions}
    _write_durably(partial / COMMON, json.dumps({**own, **common, **own}, indent=1) + "\n")
    _write_durably(_next_tracker(root), str(iteration))
    _sync_directory(partial)
    directory = iteration_directory(root, iteration)
    replaced = _replaced(directory)
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    _sync_directory(root)
    _next_tracker(root).replace(root / TRACKER)
    _sync_directory(root)
    shutil.rmtree(replaced, ignore_errors=True)


def discard_checkpoint(partial: Path) -> None:
    """Removes what a failed save has written."""
    shutil.rmtree(partial, ignore_errors=True)
    _next_tracker(partial.parent).unlink(missing_ok=True)


def describe(error: BaseException) -> str:
    """An exception in a few words on one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _replaced(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.replaced")


def _next_tracker(root: Path) -> Path:
    return root / f"{TRACKER}.partial"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
