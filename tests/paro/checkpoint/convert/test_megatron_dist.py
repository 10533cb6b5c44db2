"""Megatron-core loads what is written here, and what it saves in any layout of ranks is read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import BytesStorageMetadata, ChunkStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

import paro.checkpoint.convert.source
from data.batch import Batch
from paro.checkpoint.config import find_saved
from paro.checkpoint.convert.conversion import Conversion
from paro.checkpoint.convert.megatron import open_megatron, write_megatron
from paro.checkpoint.directory import latest_iteration
from paro.checkpoint.metadata import read_metadata
from paro.report.log import Log
from paro.training.resume import load_run
from paro.training.step import train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import TINY, begun, built, llama, save_run, whole_states
from tests.paro.checkpoint.convert.folders import (
    assert_same,
    cut,
    logits_of,
    own_model,
    some_tokens,
    source_of,
)
from tests.paro.checkpoint.convert.megatron_core import (
    LR,
    Layout,
    continue_from,
    copy_checkpoints,
    train_and_save,
)
from tests.paro.checkpoint.toy_run import Harmful
from tools.convert_checkpoint import main as convert

ROWS = 128
EMBEDDING, FC2 = "embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc2.weight"
NO_LAYERS = {"size": torch.Size((10**12, 0)), "chunks": []}
GROUPED = llama(
    5, 32, 40, heads=(8, 2, 8), length=64, vocab=100,
    rotary_base=500000.0, use_rope_scaling=True, add_qkv_bias=True, qk_layernorm=True,
)  # fmt: skip
TIED = llama(
    4, 32, 48, heads=(4, 4, 8), length=64, vocab=100, tie_embeddings_and_output_weights=True
)
MODELS = {"grouped": GROUPED, "tied": TIED}
NUMBERED, HALVES = {"non_homogeneous_layers": True}, {"singleton_local_shards": True}
ONE_RANK = [
    Layout(name="one rank", model="grouped", config=GROUPED),
    Layout(name="numbered layers", model="tied", config=TIED, metadata=NUMBERED),
]
FOUR_RANKS = [
    Layout(name="replicas", model="grouped", config=GROUPED),
    Layout(name="two parts", model="grouped", config=GROUPED, tensor=2),
    Layout(name="parts of groups", model="grouped", config=GROUPED, tensor=4, metadata=HALVES),
    Layout(name="uneven stages", model="grouped", config=GROUPED, tensor=2, pipeline=2, first=2),
    Layout(name="stages", model="tied", config=TIED, pipeline=2),
    Layout(name="virtual stages", model="tied", config=TIED, tensor=2, pipeline=2, virtual=2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [(1, ONE_RANK), pytest.param(4, FOUR_RANKS, marks=pytest.mark.verify)],
)
@pytest.mark.ranks
def test_checkpoints_of_megatron_core(
    world_size: int, layouts: list[Layout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our folder, loaded by Megatron-core, saved again in its formats, and read: every bit."""
    monkeypatch.setattr(paro.checkpoint.convert.source, "CHUNK_BYTES", 11 * 32 * 4)
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        source = source_of(config)
        write_megatron(source, tmp_path / name, rows=ROWS, divisible_by=128, dist=True)
    copies = tmp_path / "copies"
    logits, *_ = run_ranks(copy_checkpoints, world_size, layouts, tmp_path, copies, ROWS)
    for layout in layouts:
        expected = source_of(layout.config)
        for kind in ("torch_dist", "torch"):
            assert_same(open_megatron(copies / layout.name / kind), expected)
        if layout.name in logits:
            ours = logits_of(own_model(expected), some_tokens(layout.config.vocab_size))
            theirs = logits[layout.name][..., : layout.config.vocab_size]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=layout.name)


@pytest.mark.parametrize(("world_size", "tensor"), [(1, 1), (4, 2)])
@pytest.mark.ranks
@pytest.mark.verify
def test_the_optimizer_goes_from_megatron_core_and_back(
    world_size: int, tensor: int, tmp_path: Path
) -> None:
    """A Megatron-core run continues here, then there, with the losses of one all there."""
    layout = Layout(name="", model="", config=GROUPED, tensor=tensor)
    losses, *_ = run_ranks(train_and_save, world_size, layout, tmp_path, ROWS)
    for form in ("plain", "sharded"):
        there, here, back = (tmp_path / f"{form}{end}" for end in ("", "-here", "-back"))
        converted("torch_dist", "paro", there, here)
        torch.testing.assert_close(continued_here(here), losses[:3], rtol=1e-5, atol=0)
    converted("paro", "torch_dist", here, back)
    last, *_ = run_ranks(continue_from, world_size, layout, back / "iter_0000006", ROWS, 2)
    torch.testing.assert_close(last, losses[3:], rtol=1e-5, atol=0)
    by_rank = partial(converted, "torch_dist", "paro", tmp_path / "by rank", tmp_path / "no")
    refused(by_rank, "--dist-ckpt-optim-fully-reshardable")


def converted(source: str, target: str, there: Path, here: Path) -> None:
    flags = ["--from", source, "--to", target, "--with-optimizer"]
    convert([*flags, "--input", str(there), "--output", str(here)])


def continued_here(folder: Path) -> list[float]:
    """The losses of the three steps after iteration 3; then the run saves."""
    flags = (
        "--distributed-backend gloo --use-checkpoint-args --lr-decay-style constant --mock-data "
        f"--weight-decay 0.1 --clip-grad 0 --seq-length 24 --micro-batch-size 2 --lr {LR} "
        f"--train-iters 6 --load {folder} --save {folder}"
    )
    config, training = built(flags)
    resumed = load_run(config, training, Log(rank=0, world_size=1))
    state = resumed.state
    assert state is not None
    assert (state.iteration, state.consumed_train_samples) == (3, 6)
    tokens = some_tokens(GROUPED.vocab_size)
    batch = Batch(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape), tokens.numel())
    losses = [train_step(training, state, iter([batch])).loss for _ in range(3)]
    save_run(config, training, resumed, state=state)
    training.close()
    return losses


SMALL = TINY + " --add-qkv-bias --group-query-attention --num-query-groups 1 --train-iters 1"


def trained(folder: Path, flags: str = "") -> dict[str, Tensor]:
    config, training = built(f"{SMALL} --save {folder} {flags}")
    state, batches = begun(config, training)
    train_step(training, state, batches)
    save_run(config, training, state=state)
    states = whole_states(training)
    training.close()
    return states


@pytest.mark.slow("trains, converts and loads")
def test_every_state_comes_back_from_a_folder_of_torch_dist(tmp_path: Path) -> None:
    states = trained(tmp_path / "run")
    there = Conversion(
        source_format="paro", target_format="torch_dist", source=tmp_path / "run",
        target=tmp_path / "there", dtype=None, with_optimizer=True, divisible_by=128,
    )  # fmt: skip
    counted: list[int] = []
    source = there.open()
    there.write(source, counted.append)
    assert sum(counted) == there.num_bytes(source)
    converted("torch_dist", "paro", tmp_path / "there", tmp_path / "back")
    config, training = built(f"{SMALL} --padded-vocab-size 128 --load {tmp_path / 'back'}")
    resumed = load_run(config, training, Log(rank=0, world_size=1))
    back = whole_states(training)
    assert back.keys() == states.keys()
    for name, value in states.items():
        assert torch.equal(back[name][: len(value)], value), name
        assert not back[name][len(value) :].any(), name
    assert training.optimizer.num_steps == 1
    assert resumed.state is not None
    assert (resumed.state.iteration, resumed.state.scheduled_samples) == (1, 1)
    training.close()
    again = partial(converted, "paro", "torch_dist", tmp_path / "back", tmp_path / "no")
    refused(again, "convert what it was converted from")


@pytest.mark.slow("trains and saves")
@pytest.mark.parametrize("flags", ["--optimizer muon", "--no-save-optim", "--decoupled-lr 0.1"])
def test_a_run_without_such_an_optimizer_is_refused(flags: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", flags)
    message = "--decoupled-lr" if "lr" in flags else "AdamW"
    refused(partial(converted, "paro", "torch_dist", tmp_path / "run", tmp_path / "no"), message)
    assert not (tmp_path / "no").exists()


def written(folder: Path) -> Path:
    folder.mkdir()
    write_megatron(source_of(TIED), folder, rows=ROWS, divisible_by=128, dist=True)
    return folder / "release"


def with_a_layer_twice(states: dict[str, Any]) -> None:
    """Changes one bit of a chunk's place: layer 2 is there as layer 3, too, and is missing."""
    chunks = states[FC2].chunks
    at = [chunk.offsets[0] for chunk in chunks].index(2)
    moved = torch.Size((3, *chunks[at].offsets[1:]))
    chunks[at] = ChunkStorageMetadata(moved, chunks[at].sizes)


def with_states(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    """Changes the metadata of the tensors, as if a rank had not saved or a bit had flipped."""
    metadata = read_metadata(path.parent)
    change(metadata.state_dict_metadata)
    path.write_bytes(pickle.dumps(metadata))


def forged(path: Path) -> None:
    """Overwrites the description of the first tensor."""
    content = bytearray(path.read_bytes())
    begin = content.index(b"data.pkl") + 8
    content[begin : begin + 60] = b"x" * 60
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("common.pt", Path.unlink, "common.pt"),
        ("common.pt", cut, "common.pt ... damaged"),
        ("metadata.json", Path.unlink, "fsdp_dtensor"),
        ("metadata.json", lambda p: p.write_text('{"sharded_backend": "zarr"}'), "format zarr"),
        (".metadata", Path.unlink, ".metadata"),
        (".metadata", cut, ".metadata ... damaged"),
        (
            ".metadata",
            partial(with_states, lambda states: vars(states[EMBEDDING]).update(chunks=[])),
            "0 of 4096 elements",
        ),
        (
            ".metadata",
            partial(with_states, with_a_layer_twice),
            "damaged ... chunks of ... overlap",
        ),
        (
            ".metadata",  # a few bytes that name as many layers as no computer can list
            partial(with_states, lambda states: vars(states[FC2]).update(NO_LAYERS)),
            "has no ... linear_fc2.weight",
        ),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp"),
        ("__0_0.distcp", cut, "__0_0.distcp is truncated"),
        ("__0_0.distcp", forged, "__0_0.distcp"),
    ],
)
def test_a_damaged_folder_is_one_line(
    name: str, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    damage(written(tmp_path / "dist") / name)

    def convert() -> None:
        for tensor in open_megatron(tmp_path / "dist").tensors.values():
            tensor.whole(torch.float32)

    refused(convert, message)


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize(
    ("optimizer", "words", "message"),
    [
        (None, "", "has no optimizer"),
        ({"param_state_sharding_type": "of_model_space"}, "", "of_model_space"),
        ({"param_groups": [{"step": 3}]}, "", "optimizer.state.exp_avg.embedding.word_embeddings"),
        ({"optimizer": 3}, "", "has no step"),
        ({"param_groups": ["x"], "state": []}, "", "has no step"),
        ({}, "--dtype bf16", "--dtype"),
        ({}, "--to hf", "--from torch_dist --to paro ... --from paro --to torch_dist"),
    ],
)
def test_an_optimizer_that_is_not_there_is_refused(
    optimizer: Any, words: str, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "dist") / "common.pt"
    common = torch.load(path, weights_only=False)
    torch.save({**common, **({} if optimizer is None else {"optimizer": optimizer})}, path)
    argv = ["--from", "torch_dist", "--to", "paro", "--with-optimizer", *words.split()]
    argv += ["--input", str(tmp_path / "dist"), "--output", str(tmp_path / "out")]
    refused(lambda: convert(argv), message)
    assert not (tmp_path / "out").exists()


def test_a_run_is_told_to_convert_it(tmp_path: Path) -> None:
    release = written(tmp_path / "dist")
    refused(lambda: latest_iteration(tmp_path / "dist"), "tools/convert_checkpoint.py")
    release.rename(tmp_path / "dist" / "iter_0000007")
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("7")
    refused(lambda: find_saved(tmp_path / "dist"), "tools/convert_checkpoint.py")


def test_newer_folders_have_what_is_common_among_the_tensors(tmp_path: Path) -> None:
    """Megatron-core 0.20 stores an object in DCP's files in place of common.pt."""
    directory = written(tmp_path / "dist")
    common = torch.load(directory / "common.pt", weights_only=False)
    (directory / "common.pt").unlink()
    metadata: Any = read_metadata(directory)
    state = BytesIO()
    torch.save([common], state)
    for name, content in (("__2_0.distcp", state.getvalue()), ("__2_0.distcp", b"x" * 99)):
        (directory / name).write_bytes(content)
        place = _StorageInfo(name, 0, len(content))
        metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("common_state/shard_0_1")] = place
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        if content[:1] != b"x":
            assert open_megatron(tmp_path / "dist").config == TIED
    refused(lambda: open_megatron(tmp_path / "dist"), "__2_0.distcp ... damaged")


def test_objects_of_other_classes_in_the_metadata_are_inert(tmp_path: Path) -> None:
    """Megatron-core saves plans with the metadata; an object's code does not run."""
    directory = written(tmp_path / "dist")
    metadata: Any = read_metadata(directory)
    metadata.all_local_plans = [SavePlan(items=[]), Harmful(os.mkdir, str(tmp_path / "touched"))]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert open_megatron(tmp_path / "dist").config == TIED
    assert not (tmp_path / "touched").exists()
    refused(lambda: read_metadata(directory), "SavePlan")
