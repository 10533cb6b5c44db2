"""Training of a part of the model: what a run holds, says and refuses."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from model.units import parameter_shapes
from paro.arguments.parser import parse_args
from paro.checkpoint.directory import find_checkpoint
from paro.checkpoint.metadata import read_metadata
from paro.config.record import trained_lines
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from paro.precision import BYTES_OF
from paro.report.log import Log
from paro.training.assembly import build_data, build_training
from paro.training.memory_check import checkpoint_bytes
from paro.training.resume import load_run
from paro.training.step import Training
from tests.helpers.training import TINY, run_steps, save_run

FLAGS = f"{TINY} --train-iters 2 --global-batch-size 2"
LAST = "--trainable last-blocks:0.34"  # block 2 of 3
ADAPTERS = "--lora-rank 4 --lora-target-modules all-linear"


def configured(words: str) -> RunConfig:
    return RunConfig.from_args(parse_args(f"{FLAGS} {words}".split()), World())


def built(config: RunConfig) -> Training:
    return build_training(config, Control(World(), torch.device("cpu")))


def alive_bytes() -> int:
    """The bytes of every tensor's storage that is alive, each counted once."""
    while gc.collect():  # one pass leaves some of what an earlier test compiled
        pass
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.slow("collects the garbage of all tests before it")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", LAST),
        ("--bf16", LAST),
        ("", ADAPTERS),
        ("--bf16", ADAPTERS),
        ("", f"{ADAPTERS} --lora-base-dtype bf16"),
    ],
)
def test_frozen_parameters_add_their_copy_to_compute_with_and_nothing_else(
    words: str, part: str
) -> None:
    config = configured(f"{words} {part}")
    run_steps(config, built(config), build_data(config))  # fills what is kept for all runs
    before = alive_bytes()
    training = built(config)
    run_steps(config, training, build_data(config))
    held = alive_bytes() - before
    shapes, of_frozen = parameter_shapes(config.model), BYTES_OF[config.precision.frozen]
    frozen = sum(math.prod(shapes[name]) for name in shapes.keys() - config.trained)
    trained = sum(math.prod(shapes[name]) for name in config.trained)
    of_trained = 2 + 4 + 12 if words else 4 + 4 + 8  # in fp32 no master of its own
    assert held == pytest.approx(of_trained * trained + of_frozen * frozen, rel=0.02)
    assert training.optimizer.model_state_bytes() == pytest.approx(held, rel=0.02)


def test_a_run_says_what_trains() -> None:
    assert list(trained_lines(configured(""))) == []
    (line,) = trained_lines(configured(LAST))
    assert line == (
        "> --trainable last-blocks:0.34: 3,860 of 14,000 parameters (27.57%) in 9 of 30 tensors "
        "train"
    )


def test_it_resumes_with_the_same_parameters_and_moments(tmp_path: Path) -> None:
    config = configured(f"{LAST} --save {tmp_path} --load {tmp_path}")
    training = built(config)
    run_steps(config, training, build_data(config))
    save_run(config, training)
    again = built(config)
    assert load_run(config, again, Log()).state is not None
    saved, loaded = (list(run.optimizer.flat_shards()) for run in (training, again))
    assert [shard.state for shard in loaded] == [shard.state for shard in saved]
    for there, here in zip(saved, loaded, strict=True):
        assert torch.equal(there.values, here.values)


def test_a_checkpoint_without_the_moments_of_what_trains_now_is_refused(tmp_path: Path) -> None:
    config = configured(f"{LAST} --save {tmp_path}")
    save_run(config, built(config))
    more = configured(f"--load {tmp_path}")
    with pytest.raises(UserError, match=r"has no exp_avg of .*: it did not train there: give "):
        load_run(more, built(more), Log())
    for flag in ("--finetune", "--no-load-optim"):
        begins = configured(f"--load {tmp_path} {flag}")
        load_run(begins, built(begins), Log())


def test_a_checkpoint_of_all_moments_continues_with_a_part(tmp_path: Path) -> None:
    everything = configured(f"--save {tmp_path}")
    save_run(everything, built(everything))
    config = configured(f"{LAST} --load {tmp_path}")
    assert load_run(config, built(config), Log()).state is not None


def test_a_checkpoint_has_no_moments_of_frozen_parameters(tmp_path: Path) -> None:
    config = configured(f"{LAST} --bf16 --save {tmp_path}")
    save_run(config, built(config))
    folder = find_checkpoint(tmp_path, None)
    assert folder is not None
    written = 0
    for tensor in read_metadata(folder).state_dict_metadata.values():
        assert isinstance(tensor, TensorStorageMetadata)
        written += tensor.size.numel() * tensor.properties.dtype.itemsize
    assert written == checkpoint_bytes(config, has_base=False)
    assert written < checkpoint_bytes(configured("--bf16"), has_base=False) // 2
