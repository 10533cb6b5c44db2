"""Checkpoint folders after a crash, a user's changes, or another version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from paro.checkpoint.config import find_saved
from paro.checkpoint.directory import (
    COMMON,
    TRACKER,
    begin_checkpoint,
    candidates,
    describe_saved,
    discard_checkpoint,
    find_checkpoint,
    finish_checkpoint,
    latest_iteration,
    set_aside,
)
from paro.checkpoint.manifest import MANIFEST, DamagedError
from paro.report.earlier import next_number
from tests.helpers.refusals import refused, says
from tests.helpers.training import read_common


def save(root: Path, iteration: int, text: str = "") -> Path:
    """A checkpoint without tensors; `text` distinguishes it from others."""
    partial = begin_checkpoint(root, iteration)
    finish_checkpoint(partial, iteration, {"text": text})
    return root / f"iter_{iteration:07d}"


def text_in(root: Path) -> object:
    common = read_common(root)
    return None if common is None else common["text"]


def found(root: Path, **how: Any) -> int | None:
    """The iteration of the checkpoint that a run would load."""
    saved = find_saved(root, **how)
    return saved and saved.manifest.iteration


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_tracker_names_the_last_save_as_megatron_writes_it(tmp_path: Path) -> None:
    save(tmp_path, 100)
    (begin_checkpoint(tmp_path, 150) / "half").touch()  # changes nothing, and is cleared away
    assert latest_iteration(tmp_path) == 100
    refused(lambda: find_checkpoint(tmp_path, 150), "iter_0000150 does not exist")
    directory = save(tmp_path, 200, "text")
    assert (tmp_path / TRACKER).read_bytes() == b"200"
    common = json.loads((directory / COMMON).read_text())
    assert common == read_common(tmp_path)
    assert (common["format_version"], common["iteration"], common["text"]) == (2, 200, "text")
    assert common["versions"].keys() >= {"python", "torch", "numpy"}
    assert latest_iteration(tmp_path) == 200
    assert find_checkpoint(tmp_path) == directory
    assert find_checkpoint(tmp_path, 100) == tmp_path / "iter_0000100"
    assert names(tmp_path) == ["iter_0000100", "iter_0000200", TRACKER]
    save(tmp_path, 300)
    (tmp_path / TRACKER).write_text("200")  # who turned back gets older ones before newer
    assert candidates(tmp_path) == ([200, 100, 300], None)


@pytest.mark.parametrize("text", ["", "release", "-1", "12abc", "9" * 5000, "9" * 3000, "\x1b[31m"])
def test_a_tracker_that_names_no_iteration(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKER).write_text(text)
    remedy = "write the number" if len(text) < 4096 else "4,096 that may be read"
    message = refused(lambda: find_checkpoint(tmp_path), f"{TRACKER} ... {remedy}")
    assert message.isprintable()
    assert len(message) < 500
    with pytest.raises(DamagedError):
        latest_iteration(tmp_path)


def test_what_is_no_folder_of_checkpoints_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    config, tracker = tmp_path / "config.json", tmp_path / TRACKER
    config.write_text("{}")
    refused(lambda: latest_iteration(tmp_path), "no checkpoint of this project (it has config")
    refused(lambda: latest_iteration(config), f"{config} is a file: give a folder")
    tracker.write_text("100\n")
    refused(lambda: find_checkpoint(tmp_path), "iteration 100 ... iter_0000100 does not")
    refused(lambda: find_checkpoint(tmp_path, 200), "iter_0000200 does not exist")
    directory = save(tmp_path, 100)
    (directory / ".metadata").touch()
    refused(lambda: find_checkpoint(directory), f"give the folder that holds it, {tmp_path}")
    other = tmp_path / "megatron"
    (other / "release" / "mp_rank_00").mkdir(parents=True)
    (other / TRACKER).write_text("release")
    refused(lambda: candidates(other), "mp_rank_00): convert it with tools/convert_checkpoint")


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 100)
    (tmp_path / TRACKER).unlink()
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(os, "listdir", denied)
    monkeypatch.setattr(os, "scandir", denied)  # of a glob, which then finds nothing
    for look in (candidates, latest_iteration, describe_saved, lambda root: set_aside(root, 1)):
        refused(lambda look=look: look(tmp_path), f"{tmp_path} cannot be read: Permission denied")
    refused(lambda: begin_checkpoint(tmp_path, 200), f"{tmp_path} ... Permission denied")


@pytest.mark.parametrize("text", ["", '{"format_ver', "[1, 2]", "{}", '{"format_version": 1}'])
def test_a_damaged_common_file(tmp_path: Path, text: str) -> None:
    directory = save(tmp_path, 100)
    (directory / COMMON).write_text(text)
    with pytest.raises(DamagedError, match=r"common\.json is (truncated|damaged)"):
        read_common(tmp_path)
    (directory / MANIFEST).unlink()
    with pytest.raises(DamagedError, match=r"manifest\.json is missing: .*not finished.* before 2"):
        read_common(tmp_path)


def test_saving_again_replaces_the_old_one_only_when_the_new_is_complete(tmp_path: Path) -> None:
    directory = save(tmp_path, 100, "old")
    (directory / "__7_0_0.distcp").touch()  # of a larger world
    partial = begin_checkpoint(tmp_path, 100)
    assert text_in(tmp_path) == "old"
    finish_checkpoint(partial, 100, {"text": "new"})
    assert names(directory) == [COMMON, MANIFEST]
    assert text_in(tmp_path) == "new"
    assert names(tmp_path) == ["iter_0000100", TRACKER]


def test_a_crash_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save(tmp_path, 100, "old")
    partial = begin_checkpoint(tmp_path, 100)
    rename = Path.rename

    def crash_on_the_second(self: Path, target: Path) -> Path:
        if self == partial:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        finish_checkpoint(partial, 100, {"text": "new"})
    monkeypatch.undo()
    assert not directory.exists()
    assert text_in(tmp_path) == "old"
    save(tmp_path, 100, "newer")
    assert names(tmp_path) == ["iter_0000100", TRACKER]


@pytest.mark.parametrize(
    ("iteration", "text", "error"), [(100, object(), TypeError), (200, "new", OSError)]
)
def test_a_failure_before_or_in_a_rename_leaves_all_as_it_was(
    tmp_path: Path, iteration: int, text: object, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 100, "old")
    before = names(tmp_path)
    partial = begin_checkpoint(tmp_path, iteration)
    monkeypatch.setattr(Path, "rename", Mock(side_effect=OSError("no rename")))
    with pytest.raises(error, match=r"not JSON serializable|no rename"):
        finish_checkpoint(partial, iteration, {"text": text})
    discard_checkpoint(partial)
    assert names(tmp_path) == before
    assert text_in(tmp_path) == "old"


def test_the_newest_whole_one_is_found_and_if_none_is_what_is_wrong(tmp_path: Path) -> None:
    for iteration in (100, 200, 300):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000300" / COMMON).unlink()
    path = tmp_path / "iter_0000200" / MANIFEST
    path.write_text(path.read_text()[:-9])
    lines: list[str] = []
    assert found(tmp_path, log=lines.append) == 100
    for iteration, line in zip((300, 200), lines, strict=True):
        says(line, f"passing over iteration {iteration}: {tmp_path}")
    given = "iter_0000200 ... manifest.json is damaged ... another --ckpt-step"
    refused(lambda: find_saved(tmp_path, 200), given)
    (tmp_path / "iter_0000100" / MANIFEST).unlink()
    with pytest.raises(
        DamagedError, match=r"iter_0000300.*common.json is missing.*; no checkpoint there is whole$"
    ):
        find_saved(tmp_path)


@pytest.mark.parametrize("text", [None, "release"])
def test_a_lost_or_damaged_tracker_loses_no_checkpoint(tmp_path: Path, text: str | None) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    (tmp_path / TRACKER).unlink()
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
        (tmp_path / "config.json").write_text("{}")  # a user's file, next to complete checkpoints
    assert found(tmp_path) == 200
    order, complaint = candidates(tmp_path)
    assert order == [200, 100]
    assert complaint is not None
    assert TRACKER in complaint


def test_what_is_set_aside_loads_from_there_and_is_gone_here(tmp_path: Path) -> None:
    for iteration in (2, 10):
        save(tmp_path, iteration, "old")
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000010.replaced")  # a save that crashed
    begin_checkpoint(tmp_path, 12)
    (tmp_path / "progress.txt").write_text("ours")
    assert next_number(tmp_path) == 1
    earlier = set_aside(tmp_path, 1)
    assert earlier == tmp_path / "earlier_1"
    assert describe_saved(tmp_path) is None
    assert candidates(tmp_path) == ([], None)
    assert candidates(earlier) == ([10, 2], None)
    common = read_common(earlier)
    assert (common["iteration"], common["text"]) == (10, "old")
    assert "progress.txt" in names(tmp_path)

    save(tmp_path, 1, "new")
    assert candidates(tmp_path) == ([1], None)
    assert next_number(tmp_path) == 2
    assert set_aside(tmp_path, 2) == tmp_path / "earlier_2"
    assert set_aside(tmp_path, 3) is None
    assert "earlier_3" not in names(tmp_path)
