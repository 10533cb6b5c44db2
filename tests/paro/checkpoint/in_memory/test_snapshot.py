"""Generations: what is written is read, damage is found, a crash leaves one whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest
from torch import Tensor

from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.in_memory.snapshot import DATA, RECORD, Snapshot, SnapshotWriter
from paro.untrusted.checksum import crc32
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("iteration", -1),
        ("checksums", [1]),
        ("regions", [{"state": "x"}]),
        ("flags", []),
    ],
)
def test_a_record_with_wrong_fields_is_refused(tmp_path: Path, field: str, value: object) -> None:
    make_writer(tmp_path).write(7, {}, Tensor.copy_)
    (path,) = records(tmp_path)
    record = json.loads(path.read_bytes().partition(b"\n")[2]) | {field: value}
    body = json.dumps(record).encode()
    path.write_bytes(f"{crc32(body):08x}\n".encode() + body)
    refused(lambda: Snapshot.read(path), str(path))


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{RECORD}"))
