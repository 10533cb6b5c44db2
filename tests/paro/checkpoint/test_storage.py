"""States are chunks, each element in one; files of chunks are bounded, and not trusted."""

from __future__ import annotations

import io
import os
import pickle
import resource
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor

import paro.checkpoint.storage as storage
from paro.checkpoint.background import HostCopy, pin
from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.manifest import read_manifest, sum_of, write_manifest
from paro.checkpoint.metadata import read_metadata
from paro.checkpoint.storage import tensor_in
from paro.errors import RunError, UserError
from paro.layout import make_layout, whole_chunk
from paro.report.log import Log
from paro.spec.states import FlatShard
from paro.training import in_memory
from paro.training.in_memory import _Copier
from tests.helpers.refusals import refused
from tests.helpers.training import load_parameters
from tests.paro.checkpoint.toy_run import (
    FROZEN,
    IIG,
    NNN,
    ONE,
    SHAPES,
    Harmful,
    all_shards,
    assert_true,
    control_here,
    load_checkpoint,
    make_shards,
    save_checkpoint,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, 100, all_shards(IIG), {})
    return tmp_path / "iter_0000100"


@contextmanager
def small_files(num_bytes: int = 5000) -> Iterator[None]:
    """Limits files of this process; one of them may be pytest's own output."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_hold_the_chunks_and_nothing_else(saved: Path) -> None:
    metadata = read_metadata(saved)
    files = {path.name: path.read_bytes() for path in saved.glob("*.distcp")}
    assert os.fsencode(saved.parent) not in (saved / ".metadata").read_bytes()
    num_bytes = 0
    for place in metadata.storage_data.values():
        part = files[place.relative_path][place.offset : place.offset + place.length]
        tensor = torch.load(io.BytesIO(part), weights_only=True)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        num_bytes += tensor.nbytes
    assert sum(map(len, files.values())) == sum(p.length for p in metadata.storage_data.values())
    trained = sum(prod(shape) for name, shape in SHAPES.items() if name not in FROZEN)
    assert num_bytes == 3 * 4 * trained + 2 * sum(map(prod, FROZEN.values()))


def test_a_file_is_no_larger_than_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_FILE_BYTES", 1000)
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=True), {})
    contents: dict[str, list[int]] = {}
    metadata = read_metadata(tmp_path / "iter_0000100")
    for index, place in metadata.storage_data.items():
        state = metadata.state_dict_metadata[index.fqn]
        (size,) = (prod(c.sizes) for c in state.chunks if c.offsets == index.offset)
        contents.setdefault(place.relative_path, []).append(size * state.properties.dtype.itemsize)
    assert len(contents) > 3
    assert all(sum(sizes) <= 1000 for sizes in contents.values())
    shards = make_shards(ONE, 0, filled=False)
    load_checkpoint(tmp_path, shards)
    assert_true(shards)


def reseal(directory: Path) -> None:
    """As a forger would: rewrites the manifest for the current metadata."""
    manifest = read_manifest(directory)
    sums = dict(manifest.files) | {".metadata": sum_of((directory / ".metadata").read_bytes())}
    write_manifest(directory, manifest.iteration, sums, {})


def test_metadata_runs_no_code(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (saved / ".metadata").write_bytes(pickle.dumps(Harmful(os.mkdir, str(made))))
    reseal(saved)
    refused(lambda: load_parameters(tmp_path), ".metadata is damaged ... mkdir")
    assert not made.exists()


def test_a_hole_is_found_before_anything_is_read(saved: Path) -> None:
    metadata = read_metadata(saved)
    state = metadata.state_dict_metadata["exp_avg.block.wide"]
    missing = state.chunks.pop().sizes.numel()
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(saved)
    shards = make_shards(ONE, 0, filled=False)
    hole = f"exp_avg.block.wide has a hole: {35 - missing} of 35 elements found"
    refused(lambda: load_checkpoint(saved.parent, shards), hole)
    assert not any(shard.values.any() for shard in shards)


@pytest.mark.parametrize("numel", [100, 10_000], ids=["in a header", "in the data"])
def test_a_full_disk_is_called_by_its_name_and_leaves_nothing(tmp_path: Path, numel: int) -> None:
    chunks = [whole_chunk(f"p{number}", (numel,)) for number in range(10)]
    layout = make_layout(chunks, world_size=1)
    values = torch.zeros(layout.numel)
    shard = FlatShard(layout=layout, start=0, values=values, state="param")
    with small_files():
        message = refused(lambda: save_checkpoint(tmp_path, 100, [shard], {}), status=1)
    assert message.endswith(": File too large")
    assert list(tmp_path.iterdir()) == []
    assert latest_iteration(tmp_path) is None
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "inside"
    refused(lambda: save_checkpoint(root, 1, [shard], {}), "--save ... Not a directory: ... inside")


def packed(value: Any) -> memoryview:
    stream = io.BytesIO()
    torch.save(value, stream)
    return memoryview(bytearray(stream.getvalue()))


WIDE = torch.randn(6, 8)


@pytest.mark.parametrize(
    "tensor",
    [
        *(WIDE, WIDE.bfloat16(), WIDE.half(), WIDE.double(), WIDE[2:5, 1:], WIDE.t()),
        *(torch.tensor(3.5), torch.randn(2, 3, 4), torch.arange(5), torch.nn.Parameter(WIDE)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_a_tensor_is_a_view_of_the_bytes(tensor: Tensor) -> None:
    content = packed(tensor)
    found = tensor_in(content)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)
    whole = torch.frombuffer(content, dtype=torch.uint8)
    assert 0 <= found.data_ptr() - whole.data_ptr() < len(content)


def rewritten(content: memoryview, **entries: bytes) -> memoryview:
    """The same archive with other entries, by the ends of their names."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, entries.get(Path(name).stem, old.read(name)))
    return memoryview(bytearray(stream.getvalue()))


def test_what_is_no_tensor_of_these_bytes_is_refused(tmp_path: Path) -> None:
    """Without running its code or reading beyond its bytes."""
    other = {"little": b"big", "big": b"little"}[sys.byteorder]
    with pytest.raises(UserError, match="order"):
        tensor_in(rewritten(packed(WIDE), byteorder=other))
    with pytest.raises(UserError, match=r"^refused: not a tensor but a dict$"):
        tensor_in(packed({"a": WIDE}))
    made = tmp_path / "made"
    pickled = pickle.dumps(Harmful(os.mkdir, str(made)), 2)
    with pytest.raises(UserError, match=r"^refused: not a tensor, and no code in it was run$"):
        tensor_in(rewritten(packed(WIDE), data=pickled))
    assert not made.exists()
    content = packed(WIDE)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        pickled = archive.read("archive/data.pkl")
    sizes = b"K\x06K\x08\x86"
    assert pickled.count(sizes) == 1
    larger = rewritten(content, data=pickled.replace(sizes, b"K\x06K\x7f\x86"))
    with pytest.raises(RuntimeError, match=r"out of bounds|not resizable"):
        tensor_in(larger)
    with pytest.raises((RuntimeError, UserError)):
        tensor_in(content[:-30])


def shard_of(*shape: int, start: int, stop: int) -> FlatShard:
    layout = make_layout([whole_chunk("p", shape)], world_size=1)
    values = torch.arange(start, stop, dtype=torch.float32)
    return FlatShard(layout=layout, start=start, values=values, state="param")


def test_replicas_share_the_writing() -> None:
    num_bytes = []
    for rank in range(NNN.world_size):
        states = chunked_states(make_shards(NNN, rank, filled=True), writers=range(4)).values()
        num_bytes.append(sum(part.nbytes for state in states for part in state.chunks.values()))
    assert max(num_bytes) < 1.4 * min(num_bytes)  # padding is a large part of so small a model


def test_what_is_written_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paro.checkpoint.chunks.MAX_ITEM_BYTES", 64)
    shard = shard_of(6, 10, start=0, stop=60)
    parts = chunked_states([shard], writers={0})["param.p"].chunks
    assert {tuple(part.shape) for part in parts.values()} == {(1, 10)}
    assert list(parts) == [(row, 0) for row in range(6)]
    assert list(chunked_states([shard])["param.p"].chunks) == [(0, 0)]


def test_holes_and_overlaps_fail(tmp_path: Path) -> None:
    whole, part = shard_of(16, start=0, stop=16), shard_of(16, start=8, stop=12)
    for shards, complaint in (
        ([shard_of(16, start=0, stop=8)], "param.p: 8 of "),
        ([shard_of(16, start=0, stop=0)], "param.p: 0 of "),
        ([whole, part], "validate global plan"),
    ):
        with pytest.raises((AssertionError, ValueError), match=complaint):
            save_checkpoint(tmp_path, 1, shards, {})
        assert list(tmp_path.iterdir()) == []


def test_a_block_is_locked_from_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, room, gpu = MagicMock(), torch.empty(1000, dtype=torch.uint8), torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    cuda.register = cuda.cudaHostRegister
    cuda.register.return_value = 0
    pin(room, gpu)
    on, enter, register, leave = cuda.mock_calls
    assert (on, register) == (call.device(gpu), call.cudaHostRegister(room.data_ptr(), 1000, 0))
    assert (enter[0], leave[0]) == ("device().__enter__", "device().__exit__")
    cuda.register.return_value = 2
    with pytest.raises(RunError, match=r"cannot be page-locked for copies from cuda:3: CUDA error"):
        pin(room, gpu)


def test_copies_share_one_block_and_later_ones_reuse_it() -> None:
    states = chunked_states(make_shards(NNN, 1, filled=True), writers=range(4))
    some = dict(list(states.items())[::2])
    copy = HostCopy()
    copy.take(some)
    first = {id(room) for room in copy._room.values()}
    taken = copy.take(states)
    blocks = {room.untyped_storage().data_ptr() for room in copy._room.values()}
    assert len(blocks) == 2  # of the first save, and of what the second has in addition
    assert first <= {id(room) for room in copy._room.values()}
    values = [v for state in states.values() for v in state.chunks.values()]
    copies = [v for state in taken.values() for v in state.chunks.values()]
    assert len(values) > 10
    for value, copied in zip(values, copies, strict=True):
        assert value.dtype == copied.dtype
        assert torch.equal(value, copied)
    values[0].zero_()
    assert not torch.equal(values[0], copies[0])


def test_the_last_copy_ends_before_the_folder_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next start might get the folder while this one writes there."""
    copied: list[bool] = []

    def copy() -> None:
        time.sleep(0.2)
        copied.append(True)

    @contextmanager
    def folder(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(control=control_here())
        assert copied

    monkeypatch.setattr(in_memory, "snapshot_folder", folder)
    config = MagicMock(in_memory_interval=1)
    config.train.skip_train, config.checkpoint.non_persistent_local_ckpt_dir = False, None
    with in_memory.in_memory_checkpoints(config, control_here(), Log()) as copies:
        assert copies is not None
        copies.background.start(copy)


def test_its_copies_wait_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the device of a copy before its stream is used."""
    device, cuda, target = torch.device("cuda", 3), MagicMock(), torch.zeros(2)
    cuda.Stream.return_value.device = device
    for name in ("Stream", "current_stream", "set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    copier = _Copier(device)
    copier.updated()
    cuda.Stream.return_value.wait_stream.assert_called_once_with(cuda.current_stream())
    cuda.reset_mock()
    copier(target, torch.ones(2))
    # The stream remembers the device before it, and sets it afterwards.
    assert cuda.mock_calls[:2] == [call.set_device(device), call.stream(cuda.Stream())]
    assert target.tolist() == [1.0, 1.0]
