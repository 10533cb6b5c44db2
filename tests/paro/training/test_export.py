"""A folder that ranks write together has the bytes of one that a conversion writes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import paro.checkpoint.convert.source
from model.config import LlamaConfig
from model.hugging_face import hugging_face_name
from paro.checkpoint.agreement import one_process
from paro.checkpoint.chunks import ChunkedState
from paro.checkpoint.convert import hugging_face, tensor_files
from paro.checkpoint.convert.hugging_face import HuggingFacePlan, write_hugging_face
from paro.checkpoint.convert.source import LazyTensor, ModelSource, lazy, with_vocabulary
from paro.checkpoint.convert.tensor_files import bytes_of, make_files, write_parts
from paro.distributed.world import World
from paro.errors import StorageError
from paro.training.export import write_by_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import llama
from tests.paro.checkpoint.convert.folders import random_tensors

CONFIG = replace(llama(3, 10, 17, heads=(2, 1, 6), length=32, vocab=23), add_qkv_bias=True)
ROWS = 19  # of the vocabulary without padding
BASE = ("embedding.weight", "blocks.1.w_up", "blocks.2.bk")  # parameters that no rank holds
RANKS = 3


def split(values: Tensor, at: random.Random) -> Iterator[tuple[int, Tensor]]:
    """Cuts a tensor along its first dimension into up to three parts, with their first index."""
    size = values.shape[0]
    cuts = sorted({0, size, at.randrange(size), at.randrange(size)})
    for begin, end in pairwise(cuts):
        yield begin, values[begin:end]


def chunks_of_ranks(tensors: Mapping[str, Tensor]) -> list[dict[str, ChunkedState]]:
    """Each rank's chunks: of slices of columns, and of rows of these, drawn by chance."""
    at = random.Random(5)
    ranks: list[dict[str, ChunkedState]] = [
        {f"param.{name}": ChunkedState(shape=tuple(t.shape)) for name, t in tensors.items()}
        for _ in range(RANKS)
    ]
    for name, tensor in tensors.items():
        is_flat = tensor.dim() == 1
        columns = [(0, tensor)] if is_flat else [(n, part.T) for n, part in split(tensor.T, at)]
        for column, part in columns:
            for row, values in split(part, at):
                state = ranks[at.randrange(RANKS)][f"param.{name}"]
                state.chunks[(row, column)[: tensor.dim()]] = values
    return ranks


def planned(
    config: LlamaConfig, dtype: torch.dtype | None
) -> tuple[HuggingFacePlan, list[dict[str, ChunkedState]], ModelSource]:
    """The plan of ranks that hold a model without BASE, their chunks, and the whole model."""
    tensors = random_tensors(config)
    small = replace(config, vocab_size=ROWS)
    held = {name: tensor for name, tensor in tensors.items() if name not in BASE}
    found = {name: lazy(tensor) for name, tensor in tensors.items()}
    whole = ModelSource(config=small, tensors=with_vocabulary(found, ROWS))
    for name in held:
        shape, kind = found[name].shape, found[name].dtype
        found[name] = LazyTensor(
            shape=shape, dtype=kind, rows=Mock(side_effect=AssertionError), name=name
        )
    source = ModelSource(config=small, tensors=with_vocabulary(found, ROWS))
    change: Callable[[LazyTensor], LazyTensor] = lambda tensor: tensor.cast(dtype)  # noqa: E731
    plan = HuggingFacePlan.of(source.with_each(change))
    return plan, chunks_of_ranks(held), whole.with_each(change)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "MAX_FILE_BYTES", 1500)
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 300)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_of_ranks_make_the_files_of_a_conversion(
    tmp_path: Path, dtype: torch.dtype | None, tied: bool
) -> None:
    plan, ranks, whole = planned(replace(CONFIG, tie_embeddings_and_output_weights=tied), dtype)
    by_all, by_one = tmp_path / "ranks", tmp_path / "one"
    by_all.mkdir()
    by_one.mkdir()
    make_files(plan.files, by_all)
    written = []
    for rank, states in enumerate(ranks):
        held = {hugging_face_name(name.removeprefix("param.")): states[name] for name in states}
        written.append(write_parts(plan.files, by_all, held, World(rank=rank, size=RANKS)))
    assert min(written) > 0
    assert sum(written) == plan.num_bytes
    assert plan.write_rest(by_all) == write_hugging_face(whole, by_one)
    assert len(plan.files) > 2
    assert contents(by_all) == contents(by_one)


def write_alone(folder: Path) -> None:
    plan, ranks, _ = planned(CONFIG, None)
    states = ranks[0]
    for other in ranks[1:]:
        for name, state in other.items():
            states[name].chunks.update(state.chunks)
    write_by_ranks(plan, states, folder, one_process())


def interrupted(folder: Path, failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the folder, alone, until the tenth write fails; nothing looks complete before."""
    calls = 0

    def content_of(values: Tensor) -> memoryview:
        nonlocal calls
        calls += 1
        assert not (folder / "hf").exists()
        assert not [*folder.rglob("config.json"), *folder.rglob("*.index.json")]
        if calls == 10:
            raise failure
        return bytes_of(values)

    monkeypatch.setattr(tensor_files, "bytes_of", content_of)
    write_alone(folder / "hf")


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(StorageError, match=r"--save-hf .*hf: No space left"):
        interrupted(tmp_path, full, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, KeyboardInterrupt(), monkeypatch)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_was_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    refused(partial(write_alone, tmp_path / "hf"), "--save-hf", "exists")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_all_files_are_durable_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, target = list[Path](), tmp_path / "hf"

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    write_alone(target)
    before, named = synced[:-1], synced[-1]
    assert named == tmp_path
    assert {path.name for path in target.iterdir()} < {path.name for path in before}
    assert before[-1].suffix == ".tmp"
