"""A launch is checked before it allocates: memory, placement, and kernels that all ranks have."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paro.checkpoint.config import CheckpointConfig
from paro.config.context_parallel import faster_comm_type
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.errors import UserError
from paro.launch.prediction import check_memory, planned_step, upload_text
from paro.launch.setup import agree_on_kernels
from paro.planning import estimator
from paro.planning.run_memory import RunMemory
from paro.spec.offload import offloaded
from paro.training.assembly import build_training
from paro.training.replicas import check_replicas
from tests.end_to_end.test_training import RUN, launch
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused, says
from tests.helpers.training import TINY, configured, run_steps
from tests.helpers.triton_kernels import interpreter, skip_on_gpus

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WORLD = World(size=4, ranks_per_node=2)


def config_of(words: str, world: World = WORLD) -> RunConfig:
    return configured([*RUN[1:], "--train-iters", "2", *words.split()], world)


def refusal(words: str, left: int, device: torch.device = CPU, world: World = WORLD) -> str:
    """What is said where a host has so many bytes left; empty if the run may begin."""
    config = config_of(f"{words}{' --distributed-backend nccl' * (device == GPU)}", world)
    with mock.patch("paro.launch.prediction.available_host_bytes", return_value=left):
        try:
            check_memory(config, device)
        except UserError as error:
            return str(error)
    return ""


def needs(words: str) -> int:
    return config_of(words).memory.total


def test_a_save_into_a_store_says_how_fast_it_must_be_uploaded() -> None:
    text = partial(upload_text, 80 * 10**9, 4)
    waiting = CheckpointConfig(save="s3://bucket/run", save_interval=5)
    training = replace(waiting, async_save=True)
    says(text(training, 2.0), "20.0 GB", "within 10.00 s", "2 GB/s or more")
    assert text(training, None).endswith("while training continues")
    says(text(waiting, 2.0), "--async-save")
    for checkpoint in (waiting, training):
        found = text(replace(checkpoint, save_interval=None), 2.0)
        assert found.endswith("the end of the run waits for both")


def test_the_ranks_of_a_host_share_its_memory() -> None:
    both = 2 * needs("")
    assert refusal("", both) == ""
    assert refusal("", both - 1).startswith("2 ranks of this host need 1.")
    alone = World(size=4, ranks_per_node=1)
    assert refusal("", both - 1, world=alone) == ""


def test_the_line_says_what_to_lower() -> None:
    assert "spread more by --paro-strategy" in refusal("--hidden-size 512", 1)
    big = "--micro-batch-size 64 --global-batch-size 256"
    assert "lower --micro-batch-size" in refusal(big, 1)


BLOCKS = "--recompute-granularity full --recompute-method block --recompute-num-layers"


def test_the_fewest_blocks_whose_recomputation_is_enough_are_named() -> None:
    words = "--num-layers 8 --micro-batch-size 16 --global-batch-size 64"
    left = needs(f"{words} {BLOCKS} 2") + needs(f"{words} {BLOCKS} 5")  # of two ranks
    message = refusal(words, left)
    shared = "--context-parallel-size 2 --cp-comm-type p2p"
    assert f": give {BLOCKS} 4, or give {shared}, or lower --micro-batch-size, or " in message
    assert refusal(f"{words} {shared}", left) == ""
    assert refusal(f"{words} {BLOCKS} 4", left) == ""
    assert f": give {BLOCKS} 4, or " in refusal(f"{words} {BLOCKS} 3", left)
    assert "--recompute" not in refusal(words, 1)
    shared = "--context-parallel-size 4 --cp-comm-type p2p"
    assert f": give {shared}, or " in refusal(words, 2 * needs(f"{words} {shared}"))


@pytest.mark.slow("searches all candidates of a model")
@pytest.mark.parametrize("recompute", ["", " --recompute-granularity full"])
def test_where_all_is_spread_the_fewest_ranks_are_named(recompute: str) -> None:
    words = "--paro-strategy GGG --hidden-size 256 --num-layers 8 --micro-batch-size 16"

    def on(ranks: int) -> int:
        """The need of a host's two ranks among so many."""
        world = World(size=ranks, ranks_per_node=2)
        flags = f"{words}{recompute} --global-batch-size {16 * ranks}"
        return 2 * config_of(flags, world).memory.total

    assert on(8) > on(10)
    words += " --global-batch-size 64"
    message = refusal(words, on(10))
    says(message, f"start 10 ranks{' with' * bool(recompute)}{recompute}, or lower --seq-length")
    assert ("give --recompute-granularity" in message) is (recompute == "")
    assert "spread more" not in message
    assert "start" not in refusal(words, 1)


def test_the_copy_of_an_async_save_counts() -> None:
    both = 2 * needs("")
    save = "--save saved --async-save"
    assert refusal("--save saved", both) == ""
    assert refusal(save, both) != ""
    with mock.patch("torch.cuda.mem_get_info", return_value=(10**9, 10**10)):
        assert refusal("", 0, GPU) == ""
        assert refusal(save, 0, GPU).endswith("leave --async-save out")
        offload = "--optimizer-cpu-offload"
        offloading = config_of(offload)
        states = offloaded(offloading.memories.specs(offloading.spec)).host_bytes
        assert refusal(offload, 2 * states - 1, GPU).endswith(f"leave {offload} out")
        assert refusal(offload, 2 * states, GPU) == ""
        # The copy has frozen parameters unless --load keeps them.
        lora = f"{save} --lora-rank 2 --lora-target-modules all-linear"
        base = "--load base --finetune"
        sizes = [
            re.findall(r"[\d.]+ [kMG]B", refusal(f"{lora} {more}", 0, GPU))[0]
            for more in ("", base, f"{base} --save-frozen")
        ]
        assert sizes[0] == sizes[2] != sizes[1]


def test_a_device_must_have_what_a_rank_needs() -> None:
    free = needs("") // 2
    with mock.patch("torch.cuda.mem_get_info", return_value=(free, 8 * 10**10)):
        message = refusal("", 2**62, GPU)
    assert " of device memory at the backward of blocks.1, and cuda:0 has " in message
    assert " free of 80.0 GB: " in message


def test_estimates_of_the_rest_only_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("--distributed-backend nccl")
    memory = config.memory
    assert memory.communicators > 0
    more = memory.total - memory.context
    for free, warns in ((more, False), (more - 1, True), (memory.allocated, True)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _, free=free: (free, 8 * 10**10))
        warning = check_memory(config, GPU)
        assert (warning is not None) is warns
    assert warning.startswith("WARNING: with communicators and fragmentation, which are estimates,")


def test_a_start_predicts_memory_and_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(size=16, ranks_per_node=8)
    flags = "--paro-machine dgx-h100 --context-parallel-size 2 --cp-comm-type p2p"
    config = config_of(f"{flags} --bf16 --distributed-backend nccl", world)
    steps = mock.Mock(wraps=estimator.simulate)
    monkeypatch.setattr(estimator, "simulate", steps)
    faster_comm_type(config.context, config.estimator, config.strategy)  # as placement_lines does
    compared = steps.call_count
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (8 * 10**10, 8 * 10**10))
    check_memory(config, GPU)
    monkeypatch.setattr(RunMemory, "of", mock.Mock(side_effect=AssertionError("predicted again")))
    assert planned_step(config).seconds["step"] > 0
    assert config.memory.total > 0
    assert steps.call_count == compared > 0


def test_nothing_is_built_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paro.launch.setup.build_training", mock.Mock(side_effect=AssertionError("built"))
    )
    monkeypatch.setattr("paro.launch.prediction.available_host_bytes", lambda: 1)
    refused(lambda: launch("--mock-data --train-iters 2"), "1 rank of this host needs")


# Kernels: ranks that see different ones use the same

FLAGS = f"{TINY} --train-iters 2 --global-batch-size 2 --paro-strategy NNN"


def trained_with(ranks_with_triton: tuple[int, ...]) -> list[str]:
    """Trains replicas where only some ranks have Triton; the lines about kernels."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), ranks_per_node=2)
    config, control = configured(FLAGS, world), Control(world, torch.device("cpu"))
    with interpreter() if world.rank in ranks_with_triton else nullcontext():
        agreed, lines = agree_on_kernels(config, control)
        training = build_training(agreed, control)
        run_steps(config, training)
        check_replicas(training, iteration=2)
        training.close()
    return lines


def trained_with_some_and_all() -> tuple[list[str], list[str]]:
    return trained_with((1,)), trained_with((0, 1))


@pytest.mark.verify
@pytest.mark.bits
@pytest.mark.ranks
def test_all_use_torchs_operations_where_a_rank_lacks_triton() -> None:
    skip_on_gpus()
    for lines, of_same in run_ranks(trained_with_some_and_all, 2):
        assert len(of_same) == 3
        assert "WARNING" not in " ".join(of_same)
        assert lines[0].startswith("> attention: auto")
        for line, what in zip(
            lines[1:], ("norms, SwiGLU, rotary embedding and loss", "AdamW"), strict=True
        ):
            assert line.startswith("> WARNING: ranks differ: nothing on rank 0, " + what)
            assert line.endswith(" on rank 1: all use torch's operations")


@pytest.mark.bits
def test_muons_kernels_are_named() -> None:
    skip_on_gpus()
    with interpreter():
        config = configured(f"{FLAGS} --optimizer muon --no-rope-fusion", World())
        _, lines = agree_on_kernels(config, Control(World(), torch.device("cpu")))
    (update,) = (line for line in lines if "AdamW: Triton" in line)
    assert "Muon: momentum in one pass and symmetric products by Triton" in update
