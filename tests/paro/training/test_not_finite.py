"""States not finite are not saved, and --trace-nan says whence; differing replicas are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from paro.errors import RunError
from paro.optim.finite import not_finite
from paro.optim.optimizer import ParoOptimizer
from paro.spec.states import FlatShard
from paro.training import saving
from paro.training.replicas import check_replicas, hash_of
from paro.training.step import Training, train_step
from tests.end_to_end.test_training import files_in, launch
from tests.helpers.ranks import run_ranks
from tests.helpers.refusals import refused
from tests.helpers.training import TINY, begun, built, run_steps


def of_two(other: str | None) -> Mock:
    """Rank 0 of two; the other rank holds what it is told."""
    return Mock(
        sum=lambda values: [values[0] + (other is not None)], gather=lambda value: [value, other]
    )


def shards(state: str = "exp_avg", at: int = -1, value: float = 0.0) -> list[FlatShard]:
    """The shards of a small model in one process; one element of one state has a value."""
    _, training = built(f"{TINY} --train-iters 1")
    all_shards = list(training.optimizer.flat_shards())
    of_state = [shard for shard in all_shards if shard.state == state]
    if at >= 0:
        of_state[1].values[at] = value
    return all_shards


def test_which_state_of_which_rank_is_not_finite() -> None:
    assert not_finite(shards(), of_two(None)) is None
    assert not_finite(shards(at=3, value=3e38), of_two(None)) is None
    for value in (math.inf, -math.inf, math.nan):
        wrong = shards(at=3, value=value)
        name = next(iter(wrong[3].layout.chunks)).chunk.name
        assert not_finite(wrong, of_two(None)) == f"exp_avg.{name} on rank 0"
    assert not_finite(shards(), of_two("param.x")) == "param.x on rank 1"
    both = not_finite(shards("param", at=3, value=math.nan), of_two("param.x"))
    assert both == f"param.{name} on rank 0, the first of 2 ranks"


def train(root: Path, words: str) -> None:
    save = f"--save {root} --save-interval 1 --save-retain-interval 100"
    launch("--mock-data --lr-warmup-samples 0", save, words)


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_what_is_not_finite_is_not_saved(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, "--train-iters 6 --exit-interval 3")
    before = files_in(tmp_path)
    step = ParoOptimizer.step

    def spoil(self: ParoOptimizer, **factors: float) -> None:
        step(self, **factors)
        next(self.flat_shards()).values[5] = math.inf

    monkeypatch.setattr(ParoOptimizer, "step", spoil)
    refused(
        lambda: train(tmp_path, f"--train-iters 6 --load {tmp_path} {how}"),
        "iteration 4 is not saved: param.embedding.weight on rank 0 is not finite",
        f"continue with --load {tmp_path} --ckpt-step 3",
        status=1,
    )
    assert files_in(tmp_path) == before


@pytest.mark.slow("trains and saves")
def test_saves_among_skipped_steps_remove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, "--train-iters 9 --exit-interval 3")
    monkeypatch.setattr(
        ParoOptimizer, "local_square_sum", lambda _: torch.tensor(math.nan).double()
    )
    refused(
        lambda: train(
            tmp_path, f"--train-iters 9 --load {tmp_path} --exit-after-skipped-iterations 4"
        ),
        "4 iterations up to 7 ... not finite ... --exit-after-skipped-iterations 4",
        f"continue with --load {tmp_path} --ckpt-step 2",
        status=1,
    )
    assert {path.name for path in tmp_path.glob("iter_*")} == {
        f"iter_000000{iteration}" for iteration in (2, 3, 4, 5, 6)
    }


def test_what_is_not_finite_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "wrong_state", lambda _: None)  # as before it was checked
    step = ParoOptimizer.step

    def spoil(self: ParoOptimizer, **factors: float) -> None:
        step(self, **factors)
        list(self.flat_shards())[2].values[0] = math.inf

    monkeypatch.setattr(ParoOptimizer, "step", spoil)
    train(tmp_path, "--train-iters 6 --exit-interval 1")
    message = "iteration 1 exp_avg_sq.embedding.weight on rank 0 is not finite ... --ckpt-step"
    refused(lambda: train(tmp_path, f"--train-iters 6 --load {tmp_path}"), message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_bit_and_its_place_count(dtype: torch.dtype) -> None:
    last = 2**16 + 6  # whole rows of 1,024 words of 8 bytes, and a rest of 7 elements
    values = (torch.arange(last + 1) % 251).to(dtype)
    before, size = hash_of(values), values.element_size()
    assert hash_of(values.clone()) == before
    for index, bit in product((0, 1023, 1024, last - 7, last - 6, last), (0, 8 * size - 1)):
        other = values.clone()
        other.view(torch.uint8)[index * size + bit // 8] ^= 1 << bit % 8
        assert hash_of(other) != before
    for one, two in ((0, 1), (5, last - 1), (last - 1, last)):
        other = values.clone()
        other[[one, two]] = values[[two, one]]
        assert hash_of(other) != before
    assert hash_of(torch.zeros(0, dtype=dtype)) == 0


def found(strategy: str, state: str, rank: int) -> str:
    """What all ranks raise where a bit of a rank has flipped."""
    flags = f"--bf16 --train-iters 2 --global-batch-size 4 --paro-strategy {strategy}"
    config, training = built(f"{TINY} {flags} --paro-group-size 2")
    run_steps(config, training)
    check_replicas(training, iteration=2)
    if training.control.world.rank == rank:
        held = [s.values for s in training.optimizer.flat_shards() if s.state == state]
        bits = training.model.units[1].param_shard if state == "params" else held[0]
        bits.view(torch.uint8)[5] ^= 1
    try:
        check_replicas(training, iteration=2)
    except RunError as error:
        return str(error).partition(", and ")[0]
    finally:
        training.close()
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "state", "message"),
    [
        ("NNN", "exp_avg_sq", "exp_avg_sq of embedding.weight on rank 2 differs from its 3 other"),
        ("NNG", "params", "the parameters of blocks.0 on rank 2 differs from its 3 other replicas"),
        ("III", "param", "param of embedding.weight differs between ranks 0, 2"),
        ("GGG", "param", ""),  # each range is on one rank
    ],
)
def test_the_rank_and_the_state_that_differ_are_named(
    strategy: str, state: str, message: str
) -> None:
    everywhere = run_ranks(found, 4, strategy, state, 2)
    assert len(set(everywhere)) == 1
    assert everywhere[0].removeprefix("after iteration 2 ").startswith(message)
    assert bool(everywhere[0]) is bool(message)


# Where the first infinity or NaN comes from, as --trace-nan says

FLAGS = f"{TINY} --global-batch-size 4 --train-iters 3 --trace-nan"
FP8 = (
    "--bf16 --fp8-format hybrid --hidden-size 32 --ffn-hidden-size 32 --seq-length 16 "
    "--global-batch-size 4"
)
Plant = Callable[[Training], object]


def traced(flags: str, plant: Plant) -> str | None:
    """The origin that a step names after a fault was planted; the step before is fine."""
    config, training = built(flags)
    state, source = begun(config, training)
    assert train_step(training, state, source).origin is None
    plant(training)
    step = train_step(training, state, source)
    assert step.skipped
    training.close()
    return step.origin


def block(training: Training, layer: int) -> nn.Module:
    return training.model.model.get_submodule(f"blocks.{layer}")


def spoil_forward(training: Training) -> None:
    block(training, 2).register_forward_hook(lambda _, inputs, output: output * math.inf)


def spoil_backward(training: Training) -> None:
    def spoil(_: nn.Module, inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: grad / 0.0)

    block(training, 1).register_forward_hook(spoil)


def overflow(training: Training) -> None:
    """Gate and up projections of about 1e30, whose product overflows."""
    for part in training.optimizer._parts.values():
        for shard in part.flat_shards():
            for each in shard.layout.chunk_ranges(shard.start, shard.start + shard.values.numel()):
                if each.chunk.name == "blocks.1.mlp_norm":
                    begin = each.offset - shard.start
                    shard.values[begin : begin + each.high - each.low] = 1e30
        part.write_params()


def spoil_a_parameter(training: Training) -> None:
    part = next(iter(training.optimizer._parts.values()))
    part.master.detach().fill_(math.nan)
    part.write_params()


PLANTS: dict[str, tuple[Plant, str]] = {
    "forward": (spoil_forward, "forward of blocks.2: mul"),
    "backward": (spoil_backward, "backward of blocks.2: div"),
    "overflow": (overflow, "forward of blocks.1: mul"),
    "parameter": (spoil_a_parameter, "parameter embedding.weight"),
}


# Every fault with two of them without `verify`.
RUNS = ("", "--recompute-granularity full", "--bf16", FP8)
PAIRS = [
    pytest.param(kind, more, marks=[pytest.mark.verify] * ((i + j) % 2))
    for (i, kind), (j, more) in product(enumerate(PLANTS), enumerate(RUNS))
]


@pytest.mark.parametrize(("kind", "more"), PAIRS)
def test_the_unit_and_the_operation_are_named(kind: str, more: str) -> None:
    plant, origin = PLANTS[kind]
    assert traced(f"{FLAGS} {more}", plant) == f"rank 0: {origin}"


def trace_on_ranks(flags: Sequence[str]) -> list[str | None]:
    rank = torch.distributed.get_rank()
    return [traced(each, spoil_forward if rank == 1 else lambda _: None) for each in flags]


@pytest.mark.ranks
def test_the_rank_is_named() -> None:
    flags = [
        f"{FLAGS} --paro-group-size 2 {more}"
        for more in ("--paro-strategy IIG", "--paro-strategy III --paro-materialize rotate")
    ]
    for origins in run_ranks(trace_on_ranks, 4, flags):
        assert origins == ["rank 1: forward of blocks.2: mul"] * len(flags)
