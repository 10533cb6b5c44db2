"""Generations of copies in node memory: written, read, damaged; and the folder that holds them."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.in_memory import folder as module
from paro.checkpoint.in_memory.folder import SnapshotFolder, check_room, snapshot_folder
from paro.checkpoint.in_memory.snapshot import DATA, RECORD, Snapshot, SnapshotWriter
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.files.checksum import crc32
from paro.files.waits import claimed
from tests.helpers.refusals import refused
from tests.paro.checkpoint.toy_run import NNN, make_shards

FLAGS = {"seed": "1"}


def make_writer(folder: Path) -> SnapshotWriter:
    states = chunked_states(make_shards(NNN, 1, filled=True), writers=range(4))
    return SnapshotWriter(folder, name="rank-00001-a", rank=1, states=states, flags=FLAGS)


def test_two_generations_are_kept_and_files_reused(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for iteration in range(1, 6):
        writer.write(iteration, {}, Tensor.copy_)
        found = sorted(Snapshot.read(path).record.iteration for path in records(tmp_path))
        assert found == [iteration - 1, iteration][iteration == 1 :]
    assert len(list(tmp_path.iterdir())) == 4
    assert sum(path.stat().st_size for path in tmp_path.glob(f"*{DATA}")) == 2 * writer.num_bytes
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob(f"*{DATA}"))


def test_what_is_constant_is_copied_once_into_each(tmp_path: Path) -> None:
    states = chunked_states(make_shards(NNN, 1, filled=True), writers=range(4))
    constant = {name for name in states if name.startswith("param.")}
    writer = SnapshotWriter(
        tmp_path, name="rank-00001-a", rank=1, states=states, flags=FLAGS, constant=constant
    )
    copied = 0

    def count(target: Tensor, source: Tensor) -> None:
        nonlocal copied
        copied += source.nbytes
        target.copy_(source)

    num_constant, num_all = (
        sum(values.nbytes for name in names for values in states[name].chunks.values())
        for names in (constant, states)
    )
    for iteration in range(1, 5):
        writer.write(iteration, {}, count)
    assert copied == 4 * num_all - 2 * num_constant
    for path in records(tmp_path):
        Snapshot.read(path).check()


def test_a_write_that_ends_early_leaves_the_one_before(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for iteration in (1, 2):
        writer.write(iteration, {}, Tensor.copy_)
    seen = 0

    def die(target: Tensor, source: Tensor) -> None:
        nonlocal seen
        seen += 1
        target.fill_(1.0)
        if seen == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(3, {}, die)
    (path,) = records(tmp_path)
    snapshot = Snapshot.read(path)
    assert snapshot.record.iteration == 2
    snapshot.check()


def test_damage_is_found(tmp_path: Path) -> None:
    make_writer(tmp_path).write(7, {"state": 3}, Tensor.copy_)
    (path,) = records(tmp_path)
    data = path.with_suffix(DATA)
    whole = {each: each.read_bytes() for each in (path, data)}
    snapshot, random = Snapshot.read(path), Random(0)
    held = [
        byte
        for stored in snapshot.record.regions
        for byte in range(stored.offset, stored.offset + stored.num_bytes)
    ]
    for number in range(60):
        damaged = path if number % 2 else data
        content = bytearray(whole[damaged])
        place = random.randrange(len(content)) if damaged is path else random.choice(held)
        content[place] ^= 1 << random.randrange(8)
        damaged.write_bytes(content)
        refused(lambda: Snapshot.read(path).check(), str(tmp_path))
        damaged.write_bytes(whole[damaged])
    os.truncate(data, len(whole[data]) // 2)
    refused(snapshot.check, "truncated")
    data.unlink()
    refused(snapshot.check, "No such file")


def test_a_record_with_wrong_fields_is_refused(tmp_path: Path) -> None:
    make_writer(tmp_path).write(7, {}, Tensor.copy_)
    (path,) = records(tmp_path)
    record = json.loads(path.read_bytes().partition(b"\n")[2])
    for wrong in ({"format": 2}, {"checksums": [1]}, {"regions": [{"state": "x"}]}):
        body = json.dumps(record | wrong).encode()
        path.write_bytes(f"{crc32(body):08x}\n".encode() + body)
        refused(lambda: Snapshot.read(path), str(path))


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{RECORD}"))


@pytest.fixture(autouse=True)
def named_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "llama")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.0)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node-3")


CONTROL = Control(World(), torch.device("cpu"))


def path_in(base: Path, job: str = "llama") -> Path:
    return base / f"paro-{os.getuid()}-{job}-node-3"


@pytest.mark.parametrize(
    ("run_id", "slurm", "job"),
    [("llama", "", "llama"), ("none", "123", "123"), ("a/../b c", "", "a_.._b_c_9f3fd56c")],
)
def test_it_is_named_by_user_job_and_node_and_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str, slurm: str, job: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("SLURM_JOB_ID", slurm)
    with snapshot_folder(tmp_path, CONTROL, print) as found:
        assert found.path == path_in(tmp_path, job)
        assert found.path.stat().st_mode & 0o777 == 0o700
        assert found.folder_ranks == (0,)
    assert found.path.exists(), "the next start recovers from it"


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    def enter(base: Path = tmp_path) -> None:
        with snapshot_folder(base, CONTROL, print):
            pass

    with snapshot_folder(tmp_path, CONTROL, print):
        refused(enter, "another run with the same job ID", "--rdzv-id")
    enter()  # it has ended
    path = path_in(tmp_path)
    path.chmod(0o750)
    refused(enter, "open to other users")
    shutil.rmtree(path)
    path.symlink_to(tmp_path)
    refused(enter, "no folder of yours")
    path.unlink()
    (tmp_path / "file").touch()
    refused(lambda: enter(tmp_path / "file"), "--non-persistent-local-ckpt-dir")


def test_leftovers_of_dead_jobs_are_removed_after_an_hour(tmp_path: Path) -> None:
    old, new, running = (path_in(tmp_path, job) for job in ("old", "new", "running"))
    for path in (old, new, running):
        path.mkdir(mode=0o700)
        (path / "file").touch()
    long_ago = time.time() - 3700.0
    for path in (old, running):
        os.utime(path / "file", (long_ago, long_ago))
        os.utime(path, (long_ago, long_ago))
    lines: list[str] = []
    with claimed(running) as is_held, snapshot_folder(tmp_path, CONTROL, lines.append):
        assert is_held
        assert not old.exists()
        assert new.exists()
        assert running.exists()
    assert any("removed the local copies" in line and str(old) in line for line in lines)


def test_room_is_what_will_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SnapshotFolder(tmp_path, CONTROL, (0,))
    (tmp_path / "rank-00000-a.0.data").write_bytes(b"1" * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**6))
    check_room(folder, 2 * 10**6, None)
    refused(lambda: check_room(folder, 3 * 10**6, None), "3.0 MB of a node ... 2.0 MB")
    # The first of two generations is written before the earlier file is removed.
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2 * 10**5))
    check_room(folder, 4 * 10**5, None)
    refused(lambda: check_room(folder, 5 * 10**5, None), "500.0 kB of a node ... 400.0 kB")
    # States in host memory take a part of the node's memory, and none of a disk.
    monkeypatch.setattr(module, "_is_in_memory", lambda _path: True)
    refused(lambda: check_room(folder, 4 * 10**5, 10**5), "400.0 kB of a node ... 200.0 kB")
    monkeypatch.setattr(module, "_is_in_memory", lambda _path: False)
    check_room(folder, 4 * 10**5, 10**5)


def test_shares_of_the_ranks_of_a_node_are_all_files(tmp_path: Path) -> None:
    control = [Control(World(rank=rank, size=4), torch.device("cpu")) for rank in (1, 3)]
    for rank in (2, 3, 12):
        (tmp_path / f"rank-{rank:05d}-a.json").touch()
        (tmp_path / f"rank-{rank:05d}-b.json").touch()
    for each, left in zip(control, (4, 3), strict=True):
        SnapshotFolder(tmp_path, each, (1, 3)).remove_share(lambda name: "-a." in name)
        assert len(list(tmp_path.iterdir())) == left
    assert all("-b." in path.name for path in tmp_path.iterdir())


def test_memory_is_told_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (("/", "ext4"), ("/dev/shm", "tmpfs"), ("/mnt", "tmpfs"), ("/mnt", "xfs"))
    mounts = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in kinds]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    for path, is_so in (("/dev/shm/x", True), ("/dev/shmx", False), ("/mnt/x", False)):
        assert module._is_in_memory(Path(path)) == is_so, path
