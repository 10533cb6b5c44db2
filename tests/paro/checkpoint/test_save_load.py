"""Saved under one strategy, loaded under another: every bit is in its place."""

from __future__ import annotations

import dataclasses
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from paro.checkpoint.agreement import CheckpointRanks, one_process
from paro.checkpoint.chunks import chunked_states
from paro.checkpoint.convert.native import open_native, write_native
from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.load import LoadRequest
from paro.checkpoint.manifest import METADATA
from paro.checkpoint.save import write_states
from paro.checkpoint.storage import BoundedWriter
from paro.distributed.control import Control
from paro.errors import UserError
from tests.fixtures.write import FIXTURES
from tests.helpers.refusals import refused
from tests.helpers.training import load_parameters
from tests.paro.checkpoint.toy_run import (
    DEGREES_ON_EIGHT,
    GGG_ON_SIX,
    IIG,
    NII,
    NNN,
    ONE,
    SHAPES,
    STATES,
    Cut,
    all_shards,
    assert_true,
    load_checkpoint,
    make_shards,
    save_checkpoint,
    true_state,
)

CUTS = (ONE, IIG, NNN, NII, GGG_ON_SIX, DEGREES_ON_EIGHT)


@pytest.fixture(scope="module", params=CUTS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts that the ranks of each cut save together, written by one process that has all."""
    root = tmp_path_factory.mktemp("saved")
    save_checkpoint(root, 100, all_shards(request.param), {"model": {"hidden_size": 6}})
    return root


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_loads_what_any_other_saved(saved: Path, cut: Cut) -> None:
    for rank in range(cut.world_size):
        shards = make_shards(cut, rank, filled=False)
        load_checkpoint(saved, shards)
        assert_true(shards)


def test_plain_dcp_reads_every_state_as_a_whole_tensor(saved: Path) -> None:
    names = {f"{state}.block.wide": state for state in STATES}
    tensors: dict[str, Any] = {name: torch.empty(SHAPES["block.wide"]) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is no process group
        dcp.load(tensors, checkpoint_id=saved / "iter_0000100")
    for name, state in names.items():
        assert torch.equal(tensors[name], true_state(state, "block.wide"))


@pytest.fixture
def one(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=True), {})
    return tmp_path


def test_nothing_is_said_by_others(one: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Nor is anything loaded from an empty folder."""
    save_checkpoint(one, 200, make_shards(ONE, 0, filled=True), {})
    load_checkpoint(one, make_shards(ONE, 0, filled=False))
    load_parameters(one)
    assert [str(warning.message) for warning in recwarn] == []
    (one / "empty").mkdir()
    for folder in ("empty", "missing"):
        assert load_checkpoint(one / folder, make_shards(ONE, 0, filled=False)) is None


def test_checksums_of_all_files_are_not_sent_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, gather = list[int](), Control.gather

    def weighed(control: Control, value: object) -> list[Any]:
        sent.append(len(pickle.dumps(value)))
        return gather(control, value)

    monkeypatch.setattr(Control, "gather", weighed)
    save_checkpoint(tmp_path, 100, make_shards(ONE, 0, filled=True), {})
    *others, own_sums = sorted(sent)
    assert max(others) < own_sums / 2


class OtherNodeFails(CheckpointRanks):
    """This node can put iteration 200 in its place, another one cannot."""

    def first_decides(self, action: Callable[[], Any], blame: str) -> Any:
        result = super().first_decides(action, blame)
        if "iter_0000200" in os.listdir(blame.removeprefix("--save ")):
            raise UserError("rank 2: No space left on device")
        return result


def test_the_one_before_stays_where_the_next_is_not_whole_on_every_node(tmp_path: Path) -> None:
    def save(iteration: int, ranks: CheckpointRanks) -> None:
        states = chunked_states(make_shards(ONE, 0, filled=True), writers={0})
        write_states(tmp_path, iteration, states, {}, ranks=ranks, log=lambda _: None)

    alone = one_process()
    save(100, alone)
    with pytest.raises(UserError, match="rank 2"):
        save(200, OtherNodeFails(alone.everyone, alone.near, alone.folder_ranks))
    common = load_checkpoint(
        tmp_path, make_shards(ONE, 0, filled=False), request=LoadRequest(iteration=100)
    )
    assert common is not None


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"\x80\x04.")])
def test_the_one_before_stays_where_the_metadata_of_the_next_cannot_be_read(
    one: Path, damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(writer: BoundedWriter, **results: Any) -> None:
        written(writer, **results)
        damage(Path(writer.path) / METADATA)

    written = BoundedWriter.finish
    monkeypatch.setattr(BoundedWriter, "finish", finish)
    shards = make_shards(ONE, 0, filled=True)
    refused(lambda: save_checkpoint(one, 200, shards, {}), ".metadata is")
    assert latest_iteration(one) == 100
    source = open_native(FIXTURES / "2026-11-21/iii-rotated/saved")
    output = one / "converted"
    convert = partial(write_native, source, output, output, rows=source.config.vocab_size)
    refused(convert, ".metadata is")
    assert latest_iteration(output) is None


def test_a_state_is_converted_to_the_type_it_is_loaded_into(one: Path) -> None:
    shards = [
        dataclasses.replace(shard, values=shard.values.bfloat16())
        for shard in make_shards(ONE, 0, filled=False)
        if shard.state == "param"
    ]
    load_checkpoint(one, shards)
    exact = [shard for shard in make_shards(ONE, 0, filled=True) if shard.state == "param"]
    for found, wanted in zip(shards, exact, strict=True):
        assert torch.equal(found.values, wanted.values.bfloat16())


@pytest.fixture(params=[False, True])
def control_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without and with the default group of a run under NCCL, gloo's: it moves no CUDA tensors."""
    if request.param:
        torch.cuda.set_device(0)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.usefixtures("control_group")
def test_shards_on_a_gpu_are_saved_from_and_loaded_to_it(tmp_path: Path) -> None:
    there, here = (
        [dataclasses.replace(s, values=s.values.cuda()) for s in make_shards(ONE, 0, filled=filled)]
        for filled in (True, False)
    )
    save_checkpoint(tmp_path, 100, there, {})
    load_checkpoint(tmp_path, here)
    assert all(shard.values.is_cuda for shard in here)
    assert_true(here)
    assert not any(tensor.is_cuda for tensor in load_parameters(tmp_path).values())


def test_a_difference_to_the_model_is_told(one: Path) -> None:
    for name, shape, message in (
        ("wide", (5, 7), "is 7x5 there and 5x7 here"),
        ("scale", (1,), "is a scalar there and 1 here"),
    ):
        shards = make_shards(ONE, 0, filled=False, shapes=SHAPES | {f"block.{name}": shape})
        refused(partial(load_checkpoint, one, shards), f"param.block.{name} {message}")
        assert not any(shard.values.any() for shard in shards)
    some, without = make_shards(ONE, 0, filled=False), one / "without"
    without_norm = [s for s in some if s.layout.chunks[0].chunk.name != "norm.weight"]
    refused(lambda: load_checkpoint(one, without_norm), "only the checkpoint has norm.weight")
    save_checkpoint(without, 100, without_norm, {"model": {"hidden_size": 6}})
    refused(lambda: load_checkpoint(without, some), "only the model has norm.weight")
    # A field that an older checkpoint lacks has its default there.
    now = {"hidden_size": 6, "position_embedding_type": "rope"}
    load_checkpoint(without, without_norm, request=LoadRequest(model=now))
    other = LoadRequest(model=now | {"position_embedding_type": "yarn"})
    message = "position_embedding_type is rope there and yarn here"
    refused(lambda: load_checkpoint(without, without_norm, request=other), message)
