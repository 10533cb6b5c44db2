"""The folder of a run in an object store: its lock, what is a checkpoint there, what is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from paro.checkpoint import folder_lock
from paro.checkpoint.agreement import one_process
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.config import CheckpointConfig, find_saved
from paro.checkpoint.convert.torchtitan import open_torchtitan, write_torchtitan
from paro.checkpoint.directory import (
    begin_checkpoint,
    candidates,
    discard_checkpoint,
    finish_checkpoint,
    iterations_in,
    retire_checkpoint,
)
from paro.checkpoint.folder_lock import LockLostError, attempts_to_lock
from paro.checkpoint.manifest import MANIFEST, METADATA
from paro.checkpoint.save import write_states
from paro.checkpoint.storage import BoundedWriter
from paro.errors import StorageError
from paro.files.object_cache import ObjectCache
from paro.files.object_store import StorePath, path_of
from tests.helpers.object_server import BUCKET, ObjectServer
from tests.helpers.refusals import refused
from tests.helpers.training import llama
from tests.paro.checkpoint.convert.folders import assert_same, source_of
from tests.paro.checkpoint.test_folder_lock import holder, take
from tests.paro.checkpoint.toy_run import ONE, load_checkpoint, make_shards, save_checkpoint

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer().running() as server:
        yield server


@pytest.fixture
def root(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorePath:
    monkeypatch.setattr(ObjectCache, "folder", tmp_path)
    path = path_of(f"s3://{BUCKET}/{tmp_path.name}")
    assert isinstance(path, StorePath)
    return path


def test_a_lock_is_of_one_run_until_another_may_take_it(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 60.0)
    elsewhere = partial(holder, boot_id="other")
    first = take(root, elsewhere(host="node1"))
    waiting = attempts_to_lock(root, holder())
    assert "node1" in str(next(waiting))
    first.beat()
    refused(waiting.__next__, f"--save {root} is in use", "node1")
    (root / "lease_1.json").unlink()  # by hand: its holder writes it again
    first.check()
    first.release()
    second, third = (take(root, elsewhere(rendezvous_id="job")) for _ in range(2))
    assert [path.name for path in root.iterdir()] == ["lease_3.json"]
    third.check()
    for lost in (second, first):
        with pytest.raises(LockLostError):
            lost.check()
    second.release()
    third.check()


def test_a_store_that_overwrites_what_exists_and_what_renames_are_refused(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorePath, "create", lambda path, content: bool(path.write_bytes(content)))
    attempts = attempts_to_lock(root, holder())
    refused(attempts.__next__, f"--save {root}", "give another --save")
    refused(lambda: CheckpointConfig(save=str(root), start_over=True), "--start-over", str(root))


def test_a_model_of_torchtitan_is_read_from_a_store(root: StorePath, tmp_path: Path) -> None:
    model = source_of(llama(2, 32, 48, heads=(4, 2, 8), length=64, vocab=128))
    (folder := tmp_path / "model").mkdir()
    write_torchtitan(model, folder, older=False)
    for path in folder.rglob("*"):
        if path.is_file():
            (root / str(path.relative_to(folder))).write_bytes(path.read_bytes())
    assert_same(open_torchtitan(root), model)


def found(root: StorePath) -> Path | None:
    saved = find_saved(root)
    return saved and saved.manifest.directory


def test_a_checkpoint_is_there_once_its_manifest_is(root: StorePath) -> None:
    for iteration in (10, 20):
        finish_checkpoint(begin_checkpoint(root, iteration), iteration, {})
    left = begin_checkpoint(root, 30)
    (left / "0123abcd___0_0.distcp").write_bytes(b"killed")
    assert candidates(root) == ([20, 10], None)
    assert found(root) == root / "iter_0000020"
    (root / "iter_0000020" / "common.json").write_bytes(b"{")
    assert found(root) == root / "iter_0000010"
    discard_checkpoint(begin_checkpoint(root, 20))  # saved again, which fails
    assert iterations_in(root) == {10}
    finish_checkpoint(begin_checkpoint(root, 40), 40, {})
    retire_checkpoint(root, before=40, interval=100)
    assert iterations_in(root) == {40}


def test_a_save_removes_no_folder_of_another_program(root: StorePath) -> None:
    """Megatron-LM's iterations have no manifest, and while it saves one only DCP's files."""
    for name in ("iter_0000010/common.pt", "iter_0000020/__0_0.distcp", "iter_0000030/a/b.pt"):
        (root / name).write_bytes(b"theirs")
    finish_checkpoint(begin_checkpoint(root, 40), 40, {})
    for iteration in (10, 20, 30):
        refused(partial(begin_checkpoint, root, iteration), f"{root}/iter_00000{iteration}")
    assert len(root._call("find")) == 3 + 3


def test_a_save_that_lost_its_lock_changes_nothing(root: StorePath) -> None:
    def lost() -> None:
        raise LockLostError("lost")

    folder = begin_checkpoint(root, 10)
    finish_checkpoint(folder, 10, {})
    discard_checkpoint(folder, lost)
    with pytest.raises(LockLostError):
        finish_checkpoint(folder, 10, {"of": "another"}, check=lost)
    # It was stopped just after it had looked, and is woken when its successor has saved.
    refused(partial(finish_checkpoint, folder, 10, {"of": "another"}), str(folder), "another run")
    assert found(root) == folder


def test_a_full_disk_of_the_cache_is_called_so(
    root: StorePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectCache, "folder", tmp_path / "cache")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(BoundedWriter, "_write_file", mock.Mock(side_effect=full))
    states = {"x": ChunkedState(shape=(1,), chunks={(0,): torch.zeros(1)})}
    with pytest.raises(StorageError, match=f"--save {root}: --object-storage-cache-path"):
        write_states(root, 1, states, {}, ranks=one_process(), log=print)
    assert not iterations_in(root)


def test_credentials_that_expire_while_loading_pass_over_no_checkpoint(
    server: ObjectServer, root: StorePath
) -> None:
    for iteration in (100, 200):
        save_checkpoint(root, iteration, make_shards(ONE, 0, filled=True), {})
    lines: list[str] = []
    load = partial(load_checkpoint, root, make_shards(ONE, 0, filled=False), log=lines.append)
    message = "the store refuses the credentials (is a token old?)"
    for request in (f"GET {MANIFEST}", f"GET {METADATA}", "GET distcp", "HEAD distcp"):
        method, name = request.split()
        server.fails("400", method, name, times=100)
        line = refused(load, f"--load {root}", message)
        server.recovers()
        assert "damaged" not in line
    assert lines == []
    common = load()
    assert common is not None
    assert common["iteration"] == 200
    save = partial(save_checkpoint, root, 300, make_shards(ONE, 0, filled=True), {})
    for method in ("PUT", "HEAD"):
        server.fails("400", method, "distcp", times=100)
        line = refused(save, f"--save {root}: ", "the store refuses")
        server.recovers()
        assert "gone" not in line
    assert iterations_in(root) == {100, 200}
