"""Files are bounded and hold each byte once; tensors in them are views, and not trusted."""

from __future__ import annotations

import io
import os
import pickle
import resource
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paro.checkpoint.storage as storage
from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.manifest import read_manifest, sum_of, write_manifest
from paro.checkpoint.metadata import read_metadata
from paro.checkpoint.storage import tensor_in
from paro.errors import UserError
from paro.layout import make_layout, whole_chunk
from paro.spec.states import FlatShard
from tests.helpers.parameters import load_parameters
from tests.helpers.refusals import refused
from tests.paro.checkpoint.toy_run import (
    FROZEN,
    IIG,
    ONE,
    SHAPES,
    Harmful,
    all_shards,
    assert_true,
    load_checkpoint,
    make_shards,
    save_checkpoint,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint as four ranks write it; returns the folder of its iteration."""
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


def test_the_metadata_names_no_folder(saved: Path) -> None:
    assert os.fsencode(saved.parent) not in (saved / ".metadata").read_bytes()


def reseal(directory: Path) -> None:
    """As a forger would: rewrites the manifest for the current metadata."""
    manifest = read_manifest(directory)
    sums = dict(manifest.files) | {".metadata": sum_of((directory / ".metadata").read_bytes())}
    write_manifest(directory, manifest.iteration, sums, {})


def test_metadata_runs_no_code(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (saved / ".metadata").write_bytes(pickle.dumps(Harmful(os.mkdir, str(made))))
    reseal(saved)
    refused(lambda: load_parameters(tmp_path), ".metadata is missing or damaged ... mkdir")
    assert not made.exists()


def test_metadata_reaches_nothing_through_a_trusted_module(saved: Path) -> None:
    """Protocol 4 looks up dotted names, and the module of the metadata imports os."""
    module = "torch.distributed.checkpoint.metadata"
    parts = [module.encode(), b"os.getpid"]
    strings = b"".join(b"\x8c" + bytes([len(part)]) + part for part in parts)
    (saved / ".metadata").write_bytes(b"\x80\x04" + strings + b"\x93)R.")
    refused(lambda: read_metadata(saved), "it refers to ... os.getpid")


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
        told = refused(lambda: save_checkpoint(tmp_path, 100, [shard], {}), status=1)
    assert told.endswith(": File too large")
    assert list(tmp_path.iterdir()) == []
    assert latest_iteration(tmp_path) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root, shards = tmp_path / "file" / "inside", make_shards(ONE, 0, filled=True)
    refused(lambda: save_checkpoint(root, 1, shards, {}), "--save ... Not a directory: ... inside")


def packed(value: Any) -> memoryview:
    stream = io.BytesIO()
    torch.save(value, stream)
    return memoryview(bytearray(stream.getvalue()))


def shares_memory_with(content: memoryview, tensor: Tensor) -> bool:
    whole = torch.frombuffer(content, dtype=torch.uint8)
    return 0 <= tensor.data_ptr() - whole.data_ptr() < len(content)


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
    assert shares_memory_with(content, found)


def rewritten(content: memoryview, **entries: bytes) -> memoryview:
    """The same archive with other entries, by the ends of their names."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, entries.get(Path(name).stem, old.read(name)))
    return memoryview(bytearray(stream.getvalue()))


def test_bytes_of_another_order_and_what_is_no_tensor_are_refused() -> None:
    other = {"little": b"big", "big": b"little"}[sys.byteorder]
    with pytest.raises(UserError, match="order"):
        tensor_in(rewritten(packed(WIDE), byteorder=other))
    with pytest.raises(UserError, match=r"^refused: not a tensor but a dict$"):
        tensor_in(packed({"a": WIDE}))


def test_no_code_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    pickled = pickle.dumps(Harmful(os.mkdir, str(made)), 2)
    with pytest.raises(UserError, match=r"^refused: not a tensor, and no code in it was run$"):
        tensor_in(rewritten(packed(WIDE), data=pickled))
    assert not made.exists()


def test_nothing_beyond_the_bytes_is_reached() -> None:
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
