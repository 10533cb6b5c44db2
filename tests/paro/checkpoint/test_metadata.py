"""Forged metadata of a checkpoint is named in one line, before anything is read."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from paro.checkpoint.manifest import DamagedError, check_sizes
from paro.checkpoint.metadata import read_metadata
from tests.fixtures.write import FIXTURES

WHOLE = FIXTURES / "2026-11-21/iii-rotated/saved/iter_0000004"
NAME = "param.blocks.0.wo"
FIRST = MetadataIndex(NAME, (0, 0))
Change = Callable[[Metadata], object]


def set_place(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        metadata.storage_data[FIRST] = replace(metadata.storage_data[FIRST], **fields)

    return change


def set_state(**fields: Any) -> Change:
    def change(metadata: Metadata) -> None:
        state = metadata.state_dict_metadata[NAME]
        metadata.state_dict_metadata[NAME] = replace(state, **fields)

    return change


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Change:
    return set_state(chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))])


def setting(name: str, value: Any) -> Change:
    return lambda metadata: setattr(metadata, name, value)


def forged(folder: Path, change: Change) -> Path:
    """A folder whose metadata are changed after they were written."""
    metadata = read_metadata(WHOLE)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        setting("state_dict_metadata", None),
        setting("storage_data", [1]),
        lambda m: m.storage_data.update({"x": None}),
        lambda m: m.storage_data.update({FIRST: None}),
        set_place(relative_path="../../../etc/passwd"),
        set_place(relative_path="/etc/passwd"),
        set_place(relative_path="a\0b"),
        set_place(relative_path=5),
        set_place(offset=-1),
        set_place(offset="0"),
        set_place(length=0),
        set_place(length=10**30),
        lambda m: vars(m.storage_data[FIRST]).pop("length"),
        lambda m: vars(m.storage_data[FIRST]).pop("offset"),
        set_place(length=10**12),
        lambda m: m.storage_data.pop(FIRST),
        lambda m: m.state_dict_metadata.update({"x" * 1001: 1}),
        lambda m: m.state_dict_metadata.update({FIRST: 1}),
        lambda m: m.state_dict_metadata.update(x=1),
        set_state(size=(8, 8)),
        set_state(size=torch.Size([-8, 8])),
        set_state(size=torch.Size([2**40, 2**40])),
        set_state(size=torch.Size([1] * 10**5)),
        set_state(properties=None),
        set_state(properties=TensorProperties(dtype=5)),  # type: ignore[arg-type]
        set_state(chunks=5),
        set_state(chunks=[5]),
        set_state(chunks=[ChunkStorageMetadata([0], [8])]),  # type: ignore[arg-type]
        chunk((0, 0), (10**9, 8)),
        chunk((5, 0), (8, 8)),
        chunk((-1, 0), (8, 8)),
        chunk((0,), (8,)),
    ],
)
def test_a_wrong_field_is_found(change: Change, tmp_path: Path) -> None:
    folder = forged(tmp_path, change)
    with pytest.raises(DamagedError) as caught:
        read_metadata(folder)
    line = str(caught.value)
    assert line.startswith(f"{folder / '.metadata'} is missing or damaged (")
    assert line.isprintable()
    assert len(line) < 2000


def test_states_that_are_no_tensors_are_left_to_the_planner(tmp_path: Path) -> None:
    folder = forged(tmp_path, lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata()))
    assert isinstance(read_metadata(folder).state_dict_metadata["x"], BytesStorageMetadata)
    assert isinstance(read_metadata(folder).state_dict_metadata[NAME], TensorStorageMetadata)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_any_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    metadata = read_metadata(WHOLE)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    assert read_metadata(tmp_path) == metadata


NESTED = b"\x80\x02}))" + b"\x85" * 150_000  # {}, (), (((...)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(5), "is missing or damaged"),
        (b"", "EOFError"),
        (b"\x80\x02]r\xff\xff\xff\x0f.", "is missing or damaged"),
        (
            b"\x80\x02ctorch.serialization\n_get_layout\n)" + b"\x85" * 150_000 + b"R.",
            "it calls a function",
        ),
        (
            f"\x80\x02c{Metadata.__module__}\n_MEM_FORMAT_ENCODING\n)".encode("latin-1")
            + b"\x85" * 150_000
            + b"\x81.",
            "it makes an instance with arguments",
        ),
        (pickle.dumps(print), "it refers to builtins.print"),
        (NESTED[:3] + NESTED[4:] + b"Ns.", "keys of other types"),
        (NESTED[:3] + b"(" + NESTED[4:] + b"Nu.", "keys of other types"),
        (b"\x80\x02}(K\x01Nu.", "keys of other types"),
        (f"\x80\x02c{Metadata.__module__}\nMetadata\n}}b.".encode("latin-1"), "it sets fields"),
        (b"\x80\x02]}b.", "it sets fields"),
        (pickle.dumps({1}), "it holds the opcode 143"),
        (pickle.dumps(bytearray(1), 5), "it holds the opcode 150"),
    ],
    ids=[
        *("a number", "nothing", "a memo of a billion places", "a nested name of a layout"),
        *("a nested memory format", "code", "a nested key", "nested keys", "a number as key"),
        *("fields of a class", "fields of a list", "a set", "a byte array"),
    ],
)
def test_what_is_no_metadata(content: bytes, message: str, tmp_path: Path) -> None:
    """Nothing in it runs, and it takes no more memory than its size allows."""
    (tmp_path / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match=message):
        read_metadata(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_neither_metadata_nor_its_files_may_be_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(DamagedError, match="no regular file"):
        read_metadata(tmp_path)
    with pytest.raises(DamagedError, match="no regular file"):
        check_sizes(tmp_path, {".metadata": ()})
