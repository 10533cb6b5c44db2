"""Checkpoint folders on disk: layout, tracker, common.json, and their atomic replacement."""

# <root>/
#   latest_checkpointed_iteration.txt    the tracker: the iteration to resume from; written last
#   iter_0000100/                        .metadata, *.distcp, common.json and manifest.json
#   iter_0000200.TOKEN.partial/          checkpoint being written; removed by the next save
#   iter_0000100.replaced/               old checkpoint, while a new iter_0000100 is put in place
#   lease_7.json                         the run that owns the folder (folder_lock.py)
#   earlier_1/                           checkpoints moved aside by --start-over: a root folder too

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

from data.hub import how_to_fetch
from paro.checkpoint.manifest import (
    FOREIGN,
    FORMAT_VERSION,
    MANIFEST,
    METADATA,
    ChunkSums,
    DamagedError,
    Manifest,
    damaged,
    library_versions,
    sync,
    write_durably,
    write_manifest,
)
from paro.errors import StorageError, UserError, reading
from paro.files.object_store import StorePath, store_timeout
from paro.files.regular_file import paths_in, read_bytes
from paro.files.schema import Count, parse_json
from paro.report.earlier import MARK

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.json"
RANK_MARK = ".rank_"
MAX_TRACKER_BYTES = 4096  # the most bytes that are read of a tracker
_NEXT_TRACKER = "next_tracker"  # in a folder, until the folder is in place
_REPLACED = ".replaced"
_PARTIAL = ".partial"
# What an unfinished save leaves in a store; save.py names its tensor files so there.
_OWN_OBJECT = re.compile(rf"[0-9a-f]{{8}}_.*\.distcp|{re.escape(METADATA)}|{re.escape(COMMON)}")
STORE_SECONDS = 5.0  # how long a save that failed waits for a store

T = TypeVar("T")


class BaseCheckpoint(TypedDict):
    """The checkpoint that holds the frozen parameters of another."""

    folder: str
    iteration: Count
    checksum: Count  # checksum of the base's manifest, and so of all files of the base


# Ids of special tokens in a Hugging Face configuration, such as pad_token_id.
TokenIds = dict[str, int | list[int] | None]


class _Common(TypedDict):
    """The fields of common.json that are read; older files and conversions have fewer."""

    iteration: Count
    model: NotRequired[dict[str, int | float | bool | str | None]]
    state: NotRequired[dict[str, Any]]
    order: NotRequired[dict[str, Any] | None]
    schedule: NotRequired[dict[str, Any] | None]
    tokenizer: NotRequired[dict[str, int | str | None] | None]
    vocab_size: NotRequired[Annotated[int, range(1, 2**40)]]
    unpadded_vocab_size: NotRequired[Annotated[int, range(1, 2**40)]]
    num_optimizer_steps: NotRequired[Count]
    num_averaged: NotRequired[Count]
    global_batch_size: NotRequired[Annotated[int, range(1, 2**40)]]
    parameters_only: NotRequired[bool]
    has_moments: NotRequired[bool]
    dynamic_loss_scale: NotRequired[bool]
    begins_with_bos: NotRequired[bool]
    token_ids: NotRequired[TokenIds]
    lora: NotRequired[dict[str, Any] | None]
    base: NotRequired[BaseCheckpoint | None]
    converted_from: NotRequired[str | None]  # the Hugging Face folder with the same weights


def iteration_directory(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def latest_iteration(root: Path) -> int | None:
    """Return the iteration in the tracker, None without one; `DamagedError` for a bad tracker."""
    path = root / TRACKER
    with reading(f"{path}"):
        if not path.exists():
            _refuse_strangers(root)
            return None
    with damaged(path):
        text = read_bytes(path, max_bytes=MAX_TRACKER_BYTES).decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        if not iterations_in(root):
            _refuse_strangers(root)
        raise DamagedError(f"{path} says {text[:40]!r}: write the number of an iter_* folder there")
    return int(text)


def candidates(root: Path) -> tuple[list[int], str | None]:
    """Return the iterations to resume from, best first, and the tracker's fault or None.

    The order is the tracker's iteration, older iterations, newer iterations. Newer iterations are
    from a save that crashed before it wrote the tracker, or a user has set the tracker back.
    """
    on_disk = sorted(iterations_in(root), reverse=True)
    try:
        latest = latest_iteration(root)
    except DamagedError as error:
        return on_disk, str(error)
    if latest is None:
        return on_disk, f"{root / TRACKER} is missing" if on_disk else None
    others = [iteration for iteration in on_disk if iteration != latest]
    return [latest, *sorted(others, key=lambda iteration: iteration > latest)], None


def iterations_in(root: Path) -> set[int]:
    """Return every iteration that has a folder, complete or not; in a store, a manifest."""
    with reading(f"{root}"), ThreadPoolExecutor() as threads:
        folders = [path for path in paths_in(root, "iter_*") if path.is_dir()]
        if isinstance(root, StorePath):
            ended = threads.map(lambda folder: (folder / MANIFEST).exists(), folders)
            folders = [*compress(folders, ended)]
    names = [folder.name.removesuffix(_REPLACED) for folder in folders]
    return {int(name[5:]) for name in names if name[5:].isascii() and name[5:].isdigit()}


def newest_good(root: Path, *, last_fine: int) -> int | None:
    """Return the newest iteration saved before `last_fine`, the last step that went well.

    The state after `last_fine` may be the cause of the failure, so the iteration `last_fine` is
    returned only if there is no older one.
    """
    saved = [n for n in iterations_in(root) if n <= last_fine]
    before = [n for n in saved if n < last_fine]
    return max(before or saved, default=None)


def describe_saved(root: Path) -> str | None:
    """Name the iterations in a folder, complete or not; None if there are none."""
    iterations = sorted(iterations_in(root))
    if len(iterations) > 1:
        return f"{len(iterations)} checkpoints, iterations {iterations[0]} to {iterations[-1]}"
    if iterations:
        return f"a checkpoint, iteration {iterations[0]}"
    return f"a {TRACKER}" if (root / TRACKER).exists() else None


def set_aside(root: Path, number: int, check: Callable[[], None] = lambda: None) -> Path | None:
    """Move all checkpoints into a subfolder, which can be loaded like the root; None without any.

    The tracker is moved last: after a crash before that, a new run still refuses the root. `check`
    raises if another run holds the folder now.
    """
    check()
    if describe_saved(root) is None:
        return None
    earlier = root / f"{MARK}{number}"
    earlier.mkdir()
    for path in (*paths_in(root, "iter_*"), root / TRACKER):
        if path.suffix != _PARTIAL and path.exists():
            path.rename(earlier / path.name)
    sync(earlier)
    sync(root)
    return earlier


def find_checkpoint(root: Path, iteration: int | None = None) -> Path:
    """Return the folder of `iteration`, or of the latest one; `UserError` if nothing was saved."""
    wanted = latest_iteration(root) if iteration is None else iteration
    if wanted is None:
        raise UserError(f"{root} holds no checkpoint: it has no {TRACKER}{how_to_fetch(root)}")
    directory = iteration_directory(root, wanted)
    # A crash between the two renames of `finish_checkpoint` leaves only the replaced folder.
    with reading(f"{directory}"):
        for candidate in (directory, directory.with_suffix(_REPLACED)):
            if candidate.is_dir():
                return candidate
    says = f"{TRACKER} names iteration {wanted}, but " if iteration is None else ""
    raise DamagedError(f"{says}{directory} does not exist")


def common_of(manifest: Manifest) -> dict[str, Any]:
    """Read the common.json of a manifest's folder; `DamagedError` if it is damaged."""
    path = manifest.directory / COMMON
    with damaged(path):
        return common_in(manifest.read_file(COMMON), str(path))


def common_in(content: str | bytes, what: str) -> dict[str, Any]:
    """Return the fields in the content of a common.json; errors begin with `what`."""
    common: dict[str, Any] = parse_json(content, _Common, what)
    return common


def begin_checkpoint(
    root: Path, iteration: int, *, check: Callable[[], None] = lambda: None, token: str = ""
) -> Path:
    """Create an empty folder for `iteration`; remove leftovers of crashed saves.

    A store has no rename: there it is the final folder, which is no checkpoint until its manifest
    is written, the last but the tracker.

    `check` raises if another run holds the folder now. With a `token` in its name, no other run
    writes into the new folder, not even a run that has lost the lock without noticing yet.
    """
    root.mkdir(parents=True, exist_ok=True)
    check()
    directory = iteration_directory(root, iteration)
    if isinstance(root, StorePath):
        for folder in paths_in(root, "iter_*"):
            names = {path.name for path in folder.iterdir()}
            is_ours = MANIFEST in names or all(map(_OWN_OBJECT.fullmatch, names))
            if folder == directory and not is_ours:
                raise UserError(f"{folder} has files of another program: give another --save")
            if folder == directory or (is_ours and MANIFEST not in names):
                remove_folder(folder)
        return directory
    for folder in paths_in(root, f"iter_*{_PARTIAL}"):
        remove_folder(folder)
    # Marks are left by ranks killed in `ranks_by_folder`.
    for file in paths_in(root, f"{RANK_MARK}*"):
        file.unlink(missing_ok=True)
    partial = directory.with_suffix(f".{token}{_PARTIAL}" if token else _PARTIAL)
    partial.mkdir()
    return partial


def finish_checkpoint(
    partial: Path,
    iteration: int,
    common: Mapping[str, Any],
    files: Mapping[str, ChunkSums] = {},
    check: Callable[[], None] = lambda: None,
) -> None:
    """Turn a written folder into the latest checkpoint, with the last of several renames.

    `check` is called before each file that a reader looks for and every rename, and raises if
    another run holds the folder now. `files` are the other files; `common["arguments"]` goes into
    the manifest. All writes that may fail on a full disk come before the first rename.
    """
    root, tracker = partial.parent, str(iteration).encode()
    own = {"format_version": FORMAT_VERSION, "iteration": iteration, "versions": library_versions()}
    arguments = common.get("arguments", {})
    rest = {name: value for name, value in common.items() if name != "arguments"}
    content = json.dumps({**own, **rest, **own}, indent=1).encode() + b"\n"
    check()
    sums = {**files, COMMON: write_durably(partial / COMMON, content)}
    check()
    write_manifest(partial, iteration, sums, arguments)
    if isinstance(root, StorePath):
        check()
        (root / TRACKER).write_bytes(tracker)
        return
    write_durably(partial / _NEXT_TRACKER, tracker)
    sync(partial)  # file names in the folder must be durable before its name
    directory = iteration_directory(root, iteration)
    replaced = directory.with_suffix(_REPLACED)
    if directory.exists():
        check()
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)  # not yet removed: a crash here must leave one
    check()
    partial.rename(directory)
    sync(root)  # the tracker must not become durable before the folder it names
    check()
    (directory / _NEXT_TRACKER).replace(root / TRACKER)
    sync(root)  # from here on the old checkpoint is not needed
    shutil.rmtree(replaced, ignore_errors=True)


def discard_checkpoint(partial: Path, check: Callable[[], None] = lambda: None) -> None:
    """Remove the files of a failed save; the previous checkpoint is not touched.

    In a store, nothing is removed if `check` raises, or the store does not answer: the next save
    does it.
    """
    if isinstance(partial, StorePath):
        with suppress(OSError, StorageError), store_timeout(STORE_SECONDS):
            check()
            remove_folder(partial)
        return
    shutil.rmtree(partial, ignore_errors=True)


def retire_checkpoint(root: Path, *, before: int, interval: int) -> None:
    """Remove the newest checkpoint before an iteration, unless it is a multiple of `interval`.

    The folder is renamed before its files are removed: no partial checkpoint is ever visible.
    """
    older = max((n for n in iterations_in(root) if n < before), default=0)
    if older % interval == 0:
        return
    directory = iteration_directory(root, older)
    if not isinstance(root, StorePath):
        directory = directory.rename(directory.with_suffix(_PARTIAL))
    remove_folder(directory)


def remove_folder(folder: Path) -> None:
    """Remove a folder; in a store first its manifest, without which it is no checkpoint."""
    if not isinstance(folder, StorePath):
        shutil.rmtree(folder)
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    folder.remove_tree()


def in_files(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items of each file: at most `limit` bytes, or a single larger item."""
    bunch: list[T] = []
    num_bytes = 0
    for item in items:
        if bunch and num_bytes + size_of(item) > limit:
            yield bunch
            bunch, num_bytes = [], 0
        bunch.append(item)
        num_bytes += size_of(item)
    if bunch:
        yield bunch


def _refuse_strangers(root: Path) -> None:
    """Raise `UserError` if a root folder without a valid tracker holds other files."""
    if (root / METADATA).exists() or (root / COMMON).exists():
        raise UserError(
            f"{root} is one iteration of a checkpoint: give the folder that holds it, "
            f"{root.absolute().parent}"
        )
    strangers = paths_in(root, "config.json", "params.json", "*.safetensors", "*.pth", "mp_rank_*")
    if (root / "release").is_dir():
        strangers += paths_in(root / "release", "mp_rank_*", FOREIGN)
    if strangers:
        raise UserError(
            f"{root} holds no checkpoint of this project (it has {strangers[0].name}): convert it "
            "with tools/convert_checkpoint.py"
        )
