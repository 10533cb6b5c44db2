"""What a rank holds, sends and takes of its device: formulas, compared with a real rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import LlamaConfig, LoraConfig, is_adapter, targets_of
from paro.collectives import native, pipeline
from paro.collectives.choice import AlgorithmChoice
from paro.collectives.wire import Wire
from paro.distributed.groups import Groups
from paro.machine.collective_time import CollectiveTimes, StreamAxes
from paro.planning.comm_costs import CommCosts
from paro.planning.estimator import Estimator
from paro.planning.run_memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    DeviceMemory,
    RunMemory,
)
from paro.planning.sending import traffic_of
from paro.planning.simulation import QueuedJobs
from paro.planning.tally import MemorySnapshot
from paro.precision import PrecisionConfig
from paro.spec.offload import state_bytes
from paro.spec.run_spec import Materialize, groups_of
from paro.spec.units import units_of_run
from paro.step.actions import ActionKind
from paro.strategy import legal_letters
from paro.topology import AxisSpan, StreamKind
from paro.training import assembly
from tests.helpers.training import llama
from tests.paro.planning.cases import (
    DEVICE,
    machine,
    one_unit,
    plan_request,
    rank_of,
    run_of,
    silence,
)
from tests.paro.planning.test_gathering import SMALL as WIDER

SMALL = llama(3, 20, 37, heads=(4, 2, 6), length=16, vocab=59)
TIED = replace(SMALL, tie_embeddings_and_output_weights=True)
ADAPTED = replace(SMALL, lora=LoraConfig(rank=2, targets=targets_of("all-linear")))
MODERN = replace(SMALL, add_qkv_bias=True, qk_layernorm=True)


GATHER, ROTATE = Materialize.GATHER, Materialize.ROTATE
EXACT_SUMS = PrecisionConfig(compute="bf16", accumulate_allreduce_grads_in_fp32=True, ema_decay=0.9)


def all_train(_name: str) -> bool:
    return True


def keep_norms_and_embedding(name: str) -> bool:
    return "norm" in name or name == "embedding.weight"


def upper_half(name: str) -> bool:
    return name.startswith(("blocks.1.w", "blocks.2.", "head."))


CASES: dict[str, tuple[LlamaConfig, Callable[[str], bool]]] = {
    "untied": (SMALL, all_train),
    "tied": (TIED, all_train),
    "biases and norms of heads": (MODERN, all_train),
    "parts of units frozen": (SMALL, keep_norms_and_embedding),
    "lower units frozen": (SMALL, upper_half),
    "tied, embedding frozen": (TIED, upper_half),
    "adapters": (ADAPTED, is_adapter),
}


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    ("name", "letters"),
    [
        *product(["untied"], [*legal_letters(), "2,4,8", "1,2,8"]),
        *product([name for name in CASES if name != "untied"], ["GGG", "4,2,8"]),
    ],
)
def test_formulas_equal_what_a_rank_counts_and_stores(
    monkeypatch: pytest.MonkeyPatch, name: str, letters: str
) -> None:
    config, is_trained = CASES[name]
    assert_counted(monkeypatch, config, is_trained, letters)


def assert_counted(
    monkeypatch: pytest.MonkeyPatch,
    config: LlamaConfig,
    is_trained: Callable[[str], bool],
    letters: str,
    materialize: Materialize = Materialize.GATHER,
    **changes: Any,
) -> None:
    """The last rank holds the model states and sends the bytes of the formulas."""
    precision = replace(EXACT_SUMS, **changes)
    run = run_of(config, letters, precision, is_trained=is_trained, materialize=materialize)
    plans = RunMemory(None)
    specs = run.specs(plans.units(run))
    silence(monkeypatch)
    rank = rank_of(run)
    assert rank.optimizer.model_state_bytes() == state_bytes(specs).total
    rank.step(2)  # sends no updated parameters yet
    for num_micro_batches in (1, 3):
        assert rank.step(num_micro_batches) == plans.sent(run, num_micro_batches, rank=7)
    rank.step(2, full_precision=True)
    moves, exact = plans.step(run).of_step(2), [spec.exact for spec in specs]
    wanted = traffic_of(moves, exact, plans.sender(run, rank=7))
    assert rank.step(2, full_precision=True) == wanted
    assert (wanted == plans.sent(run, 2, rank=7)) is not precision.quantizes


WIDE = replace(SMALL, hidden_size=96, ffn_hidden_size=160, num_query_groups=4, kv_channels=24)
WITH_ADAPTERS = replace(WIDE, lora=LoraConfig(rank=32, targets=("wo", "w_up")))
CODES: dict[str, Any] = {
    "inter_param_bits": 4,
    "inter_grad_bits": 4,
    "accumulate_allreduce_grads_in_fp32": False,
}


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    ("letters", "config", "is_trained", "changes"),
    [
        ("NNG", WIDE, all_train, {"optimizer": "muon"}),
        # Adapters are in one unit with the norms, which are replicated.
        ("IIG", WITH_ADAPTERS, is_adapter, {"inter_param_bits": 4, "materialize": ROTATE}),
    ],
)
def test_codes_and_buckets_are_counted_too(
    monkeypatch: pytest.MonkeyPatch,
    letters: str,
    config: LlamaConfig,
    is_trained: Callable[[str], bool],
    changes: dict[str, Any],
) -> None:
    assert_counted(monkeypatch, config, is_trained, letters, **changes)


def test_the_master_is_stored_unless_it_is_the_parameter_shard() -> None:
    fp32, bf16 = PrecisionConfig(compute="fp32"), PrecisionConfig(compute="bf16")
    rounded = replace(fp32, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    for letters, precision, of_element in (
        ("GIG", fp32, 8), ("IIG", fp32, 12), ("IIG", rounded, 8), ("GIG", bf16, 12),
        ("GIG", replace(fp32, ema_decay=0.9), 12), ("GIG", replace(bf16, ema_decay=0.9), 16),
    ):  # fmt: skip
        run = run_of(SMALL, letters, precision, world_size=4, group_size=2)
        states = state_bytes(run.specs(one_unit(400)))
        assert states.optim == of_element * 100


ALL_BF16 = PrecisionConfig(compute="bf16", grad_reduce_in_bf16=True)
TINY = replace(WIDER, num_layers=3, vocab_size=192)
SNAPSHOT = MemorySnapshot(name="the update", states=8_000_000_000, transient=2_000_000_000)
TYPED = replace(DEVICE, reserved_bytes=5, communicator_bytes=7, fragmentation=0.5)


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    ("collective", "way", "changes", "strategies"),
    [
        ("native", GATHER, {}, ("NNN", "NNI", "NIG", "IIG", "III", "GGG", "2,4,8", "1,2,8")),
        *((collective, GATHER, {}, ("NIG", "GGG")) for collective in ("ho-ring", "flat", "ring")),
        ("ho-ring", ROTATE, {}, ("III", "IIG")),
        *((name, GATHER, {"optimizer": "muon"}, ("NNG", "GGG")) for name in ("native", "ho-ring")),
        ("flat", GATHER, {"inter_grad_bits": 8, "inter_param_bits": 4}, ("NNG", "III", "NIG")),
    ],
)
def test_a_step_uses_all_groups_of_its_description_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    collective: str,
    way: Materialize,
    changes: dict[str, Any],
    strategies: Sequence[str],
) -> None:
    silence(monkeypatch)
    used: set[tuple[StreamKind, AxisSpan]] = set()
    monkeypatch.setattr(Groups, "of", lambda _groups, kind, span: used.add((kind, span)))
    precision = replace(ALL_BF16, **changes)
    for text in strategies:
        used.clear()
        run = run_of(TINY, text, precision, collective=collective, materialize=way)
        rank = rank_of(run)
        for full_precision in (False, True):
            rank.step(2, full_precision=full_precision)
        rank.model.wait_for_updated_params()
        run = replace(run, device_type="cpu")
        choice = AlgorithmChoice(names=(collective,))
        described = groups_of(run, run.specs(units_of_run(run)), choice).states.items()
        assert {(kind, span) for kind, spans in described for span in spans} == used, text


def streams_of(work: Sequence[QueuedJobs]) -> list[tuple[str, StreamAxes]]:
    """The streams of work in order, once where jobs follow each other on one."""
    jobs = ((each.use, job.stream) for each in work for phase in each.phases for job in phase)
    return [stream for stream, _ in groupby(jobs)]


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize("collective", ["native", "flat"])
@pytest.mark.parametrize("text", ["NNG", "IIG", "NNN", "III", "1,2,4"])
def test_engine_and_planner_queue_on_the_same_streams(
    monkeypatch: pytest.MonkeyPatch, text: str, collective: str
) -> None:
    precision = PrecisionConfig(compute="bf16", **CODES)
    run = run_of(WIDE, text, precision, group_size=2, collective=collective)
    silence(monkeypatch)
    rank, used = rank_of(run), list[tuple[str, StreamAxes]]()

    def note(stream: tuple[StreamKind, *AxisSpan], _: float) -> None:
        kind, *span = stream
        used.append((kind.value, tuple(axis.index for axis in span)))

    rank.model.context.collectives.groups.resources.streams.note = note
    rank.step(2)
    rank.step(2)
    plans, links = RunMemory(None), machine(world_size=8, group_size=2)
    specs, times = run.specs(plans.units(run)), CollectiveTimes(links, collective)
    of_buffers = CommCosts(run=run, counts=plans.step(run), specs=specs, times=times).of_buffers
    queued = [work for costs in of_buffers for work in costs.queued.values()]
    assert {*chain.from_iterable(map(streams_of, queued))} == {*used}
    assert any(spec.quantized_grad_sync for spec in specs)
    for spec, costs, unit in zip(specs, of_buffers, rank.model.trainable_units, strict=True):
        used.clear()
        unit.grad_sync()
        sync = costs.queued[ActionKind.GRAD_SYNC]
        assert [stream for stream, _ in groupby(used)] == streams_of(sync)
        # bf16 gradients are sent, fp32 sums are kept; quantization reads and writes the sums.
        sent = spec.collectives[ActionKind.GRAD_SYNC]
        assert ("convert" in [work.name for work in sync]) == (sent != spec.quantized_grad_sync)


@pytest.mark.slow("trains a step")
@pytest.mark.parametrize(
    ("text", "trained", "precision"),
    [
        ("GGG", "", ALL_BF16),
        ("GGG", "norm", ALL_BF16),
        ("GGG", "norm", PrecisionConfig(compute="fp32", lora_base_dtype="bf16")),
        ("IIG", "", ALL_BF16),
        ("NNN", "", ALL_BF16),
        ("NGG", "", ALL_BF16),
    ],
)
def test_the_pipeline_s_buffers_are_predicted(
    monkeypatch: pytest.MonkeyPatch, text: str, trained: str, precision: PrecisionConfig
) -> None:
    held = held_by_pipelines(monkeypatch, text, trained, precision)
    assert (held > 0) is (text != "IIG")  # its collectives use one kind of links


def test_a_mutation_of_the_slots_changes_pipeline_and_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as unchanged:
        held = held_by_pipelines(unchanged, "GGG", "", ALL_BF16)
    monkeypatch.setattr(pipeline, "SLOTS", 3)
    assert held_by_pipelines(monkeypatch, "GGG", "", ALL_BF16) > held


def held_by_pipelines(
    monkeypatch: pytest.MonkeyPatch, text: str, trained: str, precision: PrecisionConfig
) -> int:
    """Return the bytes of a rank's scratch buffers, which are those predicted."""

    def is_trained(name: str) -> bool:
        return trained in name

    pipelines = AlgorithmChoice(names=("ho-ring",), num_chunks=lambda *_: 3)
    monkeypatch.setattr(assembly, "choice_of", lambda *_, **__: pipelines)
    run = run_of(TINY, text, precision, is_trained=is_trained, collective="ho-ring")
    rank, memory = rank_of(run), RunMemory(None)
    memory._num_chunks = lambda *_: 3
    silence(monkeypatch)
    for _ in range(2):
        rank.step(2)
    collectives = rank.model.context.collectives
    held = sum(
        slot.numel()
        for buffers in collectives._memory.values()
        for slot in buffers.scratch._slots.values()
    )
    assert held == memory.without_allocations(run).buffers
    return held


@pytest.mark.parametrize(
    ("text", "bits"),
    [("GGG", 16), ("IIG", 16), ("NIG", 16), ("NNN", 16), ("2,4,8", 16), ("NNG", 4), ("2,1,8", 4)],
)
def test_flat_buffers_are_predicted(monkeypatch: pytest.MonkeyPatch, text: str, bits: int) -> None:
    precision = replace(ALL_BF16, inter_grad_bits=bits)
    permuted: dict[tuple[object, ...], int] = {}

    def note(name: str) -> None:
        original = getattr(Wire, name)

        def noted(self: Wire, whole: Tensor, *more: Tensor) -> object:
            key = self.kind, self.span
            permuted[key] = max(whole.nbytes, permuted.get(key, 0))
            return original(self, whole, *more)

        monkeypatch.setattr(Wire, name, noted)

    note("all_gather")
    note("reduce_scatter")
    run = run_of(TINY, text, precision, collective="flat")
    rank = rank_of(run)
    silence(monkeypatch)
    for _ in range(2):
        rank.step(2)
    predicted = RunMemory(None).without_allocations(run).buffers
    assert sum(permuted.values()) == predicted
    assert (predicted > 0) is (text != "NNN")  # an all-reduce permutes nothing


@pytest.mark.parametrize("text", ["NNG", "NIG", "ING", "1,2,8", "IIG", "NGG"])
def test_parts_that_native_gathers_for_several_units_are_predicted(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    gathered = [0]
    original = native._gather

    def noted(wire: Wire, part: Tensor, own: Tensor, comm_dtype: torch.dtype) -> None:
        gathered.append(0 if part.is_contiguous() else part.nbytes)
        original(wire, part, own, comm_dtype)

    monkeypatch.setattr(native, "_gather", noted)
    run = run_of(TINY, text, replace(ALL_BF16, optimizer="muon"))
    rank = rank_of(run)
    silence(monkeypatch)
    rank.step(2)
    assert max(gathered) == RunMemory(None).without_allocations(run).buffers
    # Where parameters are at I only groups gather, whole units; gradients at G have no buckets.
    assert (max(gathered) > 0) is (text not in ("ING", "IIG", "NGG"))


def test_figures_are_the_machine_file_s_or_published_ones() -> None:
    run, num_groups = run_of(TINY, "IIG", ALL_BF16), 4
    for given, context, communicator, fragmentation in (
        (None, CONTEXT_BYTES, COMMUNICATOR_BYTES, FRAGMENTATION),
        (machine(device=TYPED), 5, 7, 0.5),
    ):
        memory = RunMemory(given).without_allocations(run)
        memory = replace(memory, allocations=SNAPSHOT, buffers=10**9)
        assert memory.allocated == 11 * 10**9
        assert memory.reserved == pytest.approx((1 + fragmentation) * 11e9)
        assert memory.total == memory.reserved + num_groups * communicator + context
        assert sum(memory.parts().values()) == memory.total


def test_cpu_ranks_have_only_what_their_process_takes() -> None:
    run = run_of(TINY, "IIG", ALL_BF16, device_type="cpu")
    for typed, context in ((None, 0), (machine(device=TYPED), 5)):
        memory = RunMemory(typed).of(run)
        assert memory == DeviceMemory(allocations=memory.allocations, context=context)
    given = plan_request(device_type="cpu", collective="ho-ring")
    memory = Estimator(given).memory(given.candidate(given.strategy("GGG")))
    assert memory == DeviceMemory(allocations=memory.allocations)


def test_a_run_on_other_ranks_has_units_padded_for_them() -> None:
    memories, run = RunMemory(None), run_of(TINY, "NNG", ALL_BF16)
    for world_size in (run.world_size, 7 * run.world_size):
        spread = replace(run.strategy, optim=world_size)
        other = replace(run, world_size=world_size, strategy=spread)
        assert memories.of(other) == RunMemory(None).of(other)


def test_an_evaluation_of_averages_has_a_copy_of_parameters_that_codes_changed() -> None:
    """One of this rank's range in bf16, beside the states; other parameters need none."""
    for changes, copied in (({}, 0), (CODES, 2)):
        precision = PrecisionConfig(compute="bf16", ema_decay=0.9, **changes)
        run = replace(run_of(WIDE, "NIG", precision), eval_micro_batch_size=64)
        specs = run.specs(RunMemory(None).units(run))
        coded = [spec.layout.numel for spec in specs if spec.update_format is not None]
        assert len(coded) == (3 if changes else 0), "the blocks"
        plain, averaged = (
            RunMemory(None).of(replace(run, eval_ema=eval_ema)).allocations
            for eval_ema in (False, True)
        )
        assert "in an evaluation" in averaged.name
        assert averaged.total - plain.total == copied * sum(coded) // run.world_size
