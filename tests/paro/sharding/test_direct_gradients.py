"""Matmuls write gradients into flat buffers without a copy, and collectives run beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import cross_entropy, embedding, layers, llama, matmul
from model.config import matmul_writes
from paro.collectives import wire
from paro.planning.activations import Activations
from paro.precision import PrecisionConfig
from paro.rotation.rotated_model import RotatingUnit
from paro.sharding.distributed_model import DistributedModel
from paro.sharding.sharded_unit import ShardedUnit
from paro.spec.run_spec import Materialize
from paro.step.actions import ActionKind
from paro.step.slices import SliceSlot
from paro.topology import AxisSpan, StreamKind
from paro.training.step import Training
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, built, train
from tests.paro.planning.cases import rank_of, run_of, silence
from tests.paro.planning.test_units import SMALL, upper_half

UNGROUPED, FP32 = replace(SMALL, num_query_groups=4), PrecisionConfig(compute="fp32")
MATMULS = {"aten::mm", "aten::addmm"}


class Passes(TorchDispatchMode):
    """Counts elements of gradient buffers that operations other than matmuls write."""

    def __init__(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        # A buffer's storage is resized and never replaced.
        self._buffers = {buffer.untyped_storage()._cdata: name for name, buffer in buffers}
        self.written: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name not in MATMULS and func._schema.is_mutable:
            tensor = (kwargs or {}).get("out", args[0] if args else None)
            if isinstance(tensor, Tensor):
                unit = self._buffers.get(tensor.untyped_storage()._cdata)
                if unit is not None:
                    self.written[unit] = self.written.get(unit, 0) + tensor.numel()
        return out


def built_with(more: str) -> Training:
    return built(f"{TINY} --global-batch-size 2 --train-iters 1 {more}")[1]


def passes(more: str) -> dict[str, int]:
    """Elements of gradients that other operations than matmuls write, by unit."""
    training = built_with(more)
    found = passes_of(training.model, [(u.name, u.grad_shard) for u in training.model.units])
    training.close()
    return found


def passes_of(model: DistributedModel, buffers: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    counted = Passes(buffers)
    two_micro_batches(model, counted)
    model.finish_grad_sync()
    return counted.written


def two_micro_batches(model: DistributedModel, watched: AbstractContextManager[object]) -> None:
    tokens_BS, weights_BS = torch.zeros(1, 12, dtype=torch.int64), torch.ones(1, 12)
    model.begin_step(2)
    for index in range(2):
        with watched:
            model.forward_backward(tokens_BS, tokens_BS, weights_BS, last=index == 1)


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    "more", ["", "--bf16 --grad-reduce-in-bf16", "--recompute-granularity full"]
)
def test_only_norms_are_copied_and_added(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = passes(more)
    for module in (layers, cross_entropy, embedding):
        monkeypatch.setattr(module, "sink_of", lambda _: None)
    before = passes(more)
    blocks = [name for name in found if name.startswith("blocks.")]
    assert len(blocks) == 3
    for name in blocks:
        assert found[name] == 2 * 2 * 20, "two norms of 20, in two micro-batches"
        assert before[name] == 2 * (4 * 20 * 20 + 3 * 20 * 37 + 2 * 20), "every gradient"
    assert found["head"] == 2 * 20, "the norm"
    assert before["head"] == 2 * (60 * 20 + 20)


def test_a_mutation_of_what_matmuls_write_changes_rank_and_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def both() -> tuple[int, int]:
        run = run_of(SMALL, "NNN", PrecisionConfig(compute="fp32"), device_type="cpu")
        return passes("")["blocks.1"], Activations(run)._transients["before_gradients"]

    before = both()
    nothing = (lambda buffer_bytes, operand_bytes, device_type: False).__code__
    monkeypatch.setattr(matmul_writes, "__code__", nothing)
    assert all(more > less for more, less in zip(both(), before, strict=True))


@pytest.mark.verify
@pytest.mark.parametrize("recompute", ["", "--recompute-granularity full"])
def test_compiled_graphs_return_gradients_of_norms_alone(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile takes no dispatch mode: gradients are counted where sinks take them."""
    more, received = f"--torch-compile aot_eager {recompute}", dict[str, int]()
    original = matmul.GradSink.take

    def take(sink: Any, leaf: Tensor) -> None:
        if leaf.grad is not None:
            name = sink.model.units[sink.number].name
            received[name] = received.get(name, 0) + leaf.grad.numel()
        original(sink, leaf)

    def written(*sizes: Any) -> bool:
        assert matmul_writes(*sizes), "nothing is stored that a matmul can write"
        return True

    monkeypatch.setattr(matmul.GradSink, "take", take)
    monkeypatch.setattr(matmul, "matmul_writes", written)
    two_micro_batches(built_with(more).model, nullcontext())
    norms = {f"blocks.{layer}": 2 * 2 * 20 for layer in range(3)}
    assert received == norms | {"head": 2 * 20}
    received.clear()
    monkeypatch.setattr(llama, "number_weights", lambda _: None)
    two_micro_batches(built_with(more).model, nullcontext())
    assert received["blocks.1"] == 2 * (4 * 20 * 20 + 3 * 20 * 37 + 2 * 20), "every gradient"


def test_whole_gradients_are_written_by_matmuls_and_shards_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence(monkeypatch)
    rank = rank_of(run_of(UNGROUPED, "IIG", FP32))
    units = {unit.name: unit for unit in rank.model.units if isinstance(unit, ShardedUnit)}
    buffers = [
        (name, buffer)
        for name, unit in units.items()
        if unit._grad_U is not None
        for buffer in (unit._grad_U.values, unit.grad_shard)
    ]
    written = passes_of(rank.model, buffers)
    for name, norms in {"blocks.0": 2, "blocks.1": 2, "blocks.2": 2, "head": 1}.items():
        padding = sum(high - low for low, high in units[name].layout.gaps())
        assert written[name] == 2 * (norms * 20 + padding + units[name].grad_shard.numel()), name


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize("is_trained", [lambda _name: True, upper_half], ids=["all", "upper"])
def test_sums_that_rotate_are_written_by_matmuls(
    is_trained: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    monkeypatch.setattr(wire.dist, "P2POp", lambda *_: None)  # writes nothing, other than `silence`
    run = run_of(UNGROUPED, "IIG", FP32, is_trained=is_trained, materialize=Materialize.ROTATE)
    rank = rank_of(run)
    units = {unit.name: unit for unit in rank.model.units if isinstance(unit, RotatingUnit)}
    buffers = [
        (name, buffer)
        for name, unit in units.items()
        if unit.trainable
        for buffer in (unit._slots[SliceSlot.GRAD], unit._slots[SliceSlot.GRAD_2], unit.grad_shard)
    ]
    written = passes_of(rank.model, buffers)
    parts = [name for name, unit in units.items() if unit.trainable and name != "embedding"]
    assert {"blocks.2.attention", "blocks.2.mlp", "head"} <= {*parts}
    for name in parts:
        unit = units[name]
        first = unit._ring.owner_of(unit._ring.size - 1)
        padding = sum(high - low for low, high in unit._gaps[first])
        # This rank's own sum is added to its shard when it has come home.
        assert written[name] == 2 * (padding + unit.grad_shard.numel()), name


# Communication overlaps with computation, or not at all with 0 prefetched units

# No clocks: the comm stream of a collective is blocked until the training thread has reached a
# computation after the call. With overlap it reaches it; without, it waits for the collective
# itself, and the block times out.


class Hold:
    """Blocks a comm stream before one call of `unit.method`, until `reached` is called."""

    def __init__(
        self, unit: ShardedUnit, method: str, kind: StreamKind, span: AxisSpan, patience: float
    ) -> None:
        self._reached = threading.Event()
        self._patience = patience
        self.overlapped: bool | None = None
        original: Callable[..., None] = getattr(unit, method)
        streams = unit.context.collectives.groups.resources.streams

        def held(**arguments: object) -> None:
            if self.overlapped is None:
                self.overlapped = False
                streams.submit((kind, span[-1]), self._wait)
            original(**arguments)

        setattr(unit, method, held)

    def _wait(self) -> None:
        self.overlapped = self._reached.wait(self._patience)

    def reached(self) -> None:
        if self.overlapped is not None:  # the call has been made
            self._reached.set()


def watch(flags: str, prefetch: int) -> dict[str, bool | None]:
    """Which collectives were still in flight when a later computation began."""
    patience = 20.0 if prefetch else 0.5  # seconds; with overlap some milliseconds are enough
    holds: dict[str, Hold] = {}

    def before(training: Training) -> None:
        units = {unit.name: unit for unit in training.model.units}
        modules = dict(training.model.model.named_modules())
        sent = units["head"].spec.collectives
        spans = {kind: found[0].span for kind, found in sent.items() if found}

        if ActionKind.GATHER in spans:
            gather = Hold(
                units["blocks.1"], "gather", StreamKind.GATHER, spans[ActionKind.GATHER], patience
            )
            holds["gather of block 1 under forward of block 0"] = gather
            modules["blocks.0"].register_forward_pre_hook(lambda *_: gather.reached())

        reducing = spans.get(ActionKind.REDUCE) or spans[ActionKind.GRAD_SYNC]
        reduce = Hold(units["blocks.2"], "reduce", StreamKind.REDUCE, reducing, patience)
        holds["reduction of block 2 under backward of block 1"] = reduce

        def in_backward(_module: object, _inputs: object, output: Tensor) -> None:
            output.register_hook(lambda _gradient: reduce.reached())

        modules["blocks.0"].register_forward_hook(in_backward)  # its output is block 1's input

        if ActionKind.PARAM_ALL_GATHER in spans:
            span = spans[ActionKind.PARAM_ALL_GATHER]
            started = Hold(units["head"], "param_all_gather", StreamKind.GATHER, span, patience)
            holds["all-gather of the updated head under the next forward"] = started
            modules["blocks.0"].register_forward_pre_hook(lambda *_: started.reached())

    train(f"{flags} --paro-prefetch-units {prefetch}", group_size=2, before=before)
    return {name: hold.overlapped for name, hold in holds.items()}


FLAGS = f"{TINY} --train-iters 2 --global-batch-size 4"


CASES = [("IIG", 1, 3), ("NIG", 1, 2), ("NNG", 1, 2), ("IIG", 0, 3)]  # the last without overlap


def watch_all() -> list[dict[str, bool | None]]:
    return [watch(f"{FLAGS} --paro-strategy {name}", prefetch) for name, prefetch, _ in CASES]


@pytest.mark.ranks
def test_collectives_run_beside_compute_unless_no_units_are_ahead() -> None:
    for of_rank in run_ranks(watch_all, 4):
        for case, seen in zip(CASES, of_rank, strict=True):
            assert len(seen) == case[2], case
            assert set(seen.values()) == {case[1] > 0}, (case, seen)


def repeat(flags: str, times: int) -> list[list[tuple[float, float]]]:
    runs = [train(flags, group_size=4) for _ in range(times)]
    return [[(step.loss, step.grad_norm) for step in run.steps] for run in runs]


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "steps"), [("2,4,8", 6), ("IIG", 100), ("GGG", 100)])
def test_busy_lanes_give_the_same_bits_twice(strategy: str, steps: int) -> None:
    flags = f"{TINY} --train-iters {steps} --global-batch-size 16 --paro-strategy {strategy}"
    first, second = run_ranks(repeat, 8, flags, 2, timeout=3000)[0]
    assert len(first) == steps
    assert first == second
    assert torch.tensor(first).isfinite().all()
