"""Averaged weights, and optimizer states in host memory: their bits, and what they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from data.batch import Batch
from paro.checkpoint.convert.native import open_native
from paro.config.run import RunConfig
from paro.launch.prediction import checkpoint_bytes
from paro.optim.finite import ROW, not_finite, square_sum
from paro.planning.estimator import Estimator
from paro.planning.run_memory import RunMemory
from paro.precision import PrecisionConfig
from paro.report.log import Log
from paro.sharding.buffers import _SWAPPED, swap
from paro.spec import offload
from paro.spec.offload import OffloadedStates, offloaded
from paro.spec.states import PARAM
from paro.training.assembly import build_data, build_sources
from paro.training.evaluation import evaluate
from paro.training.resume import load_run
from paro.training.step import Training, train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, begun, built, save_run, whole_states
from tests.paro.planning.cases import machine, plan_request, run_of
from tests.paro.planning.test_units import WIDE
from tests.paro.training.test_base import written_bytes
from tools.planning.tables import rows_table

DECAY = 0.8
FLAGS = f"{TINY} --ema-decay {DECAY} --eval-ema --eval-iters 2 --train-iters 6"


@pytest.mark.slow("trains several times")
@pytest.mark.parametrize("more", ["", "--optimizer muon"])
def test_the_average_is_that_of_torch_with_bias_correction(more: str) -> None:
    """Adam's correction of a sum that begins at 0, written as a step towards the parameters."""

    def average(mean: Tensor, param: Tensor, number: Tensor) -> Tensor:
        share = (1 - DECAY) / (1 - DECAY ** (int(number) + 1))
        return mean + share * (param - mean)

    flags = f"{FLAGS} --ema-start 3 --ema-interval 2 --global-batch-size 2 {more}"
    config, training = built(flags)
    state, source = begun(config, training)
    holder = torch.nn.ParameterDict(_states(training, "param"))
    theirs: AveragedModel | None = None
    for iteration in range(1, 7):
        train_step(training, state, source)
        if iteration not in (3, 5):
            continue
        holder.load_state_dict(_states(training, "param"))
        theirs = theirs or AveragedModel(holder, avg_fn=average)
        theirs.update_parameters(holder)
    assert training.optimizer.num_averaged == 2
    wanted = dict(theirs.module.named_parameters())
    for name, values in _states(training, "ema").items():
        assert torch.allclose(values, wanted[name], rtol=1e-6, atol=1e-7), name


def _states(training: Training, kind: str) -> dict[str, Tensor]:
    """Whole states by names without a dot, which containers of torch refuse."""
    states = whole_states(training, only=kind)
    return {name.partition(".")[2].replace(".", "/"): states[name] for name in states}


ANEW, LEFT = "averaged weights begin anew", "averaged weights are left behind"


@pytest.mark.slow("saves and loads")
@pytest.mark.parametrize(
    ("before", "after", "message", "number"),
    [
        ("--ema-decay 0.8", "--ema-decay 0.8", None, 2),
        ("", "--ema-decay 0.8", ANEW, 0),
        ("--ema-decay 0.8", "", LEFT, 0),
        ("--ema-decay 0.8", "--ema-decay 0.8 --finetune", None, 0),
    ],
)
def test_a_run_takes_over_an_average_or_says_that_it_does_not(
    tmp_path: Path, before: str, after: str, message: str | None, number: int
) -> None:
    run = f"{TINY} --train-iters 6 --global-batch-size 2"
    config, training = built(f"{run} {before} --save {tmp_path}")
    state, source = begun(config, training)
    for _ in range(2):
        train_step(training, state, source)
    save_run(config, training, state=state)
    lines: list[str] = []
    config, loaded = built(f"{run} {after} --load {tmp_path}")
    resumed = load_run(config, loaded, Log(rank=0, world_size=1, write=lines.append))
    assert [line for line in (ANEW, LEFT) if line in "".join(lines)] == [message] * bool(message)
    assert loaded.optimizer.num_averaged == number
    if number == 0 and "ema" in after:
        state = resumed.state or state
        train_step(loaded, state, begun(config, loaded)[1])
        masters = whole_states(loaded, only="param")
        for name, values in whole_states(loaded, only="ema").items():
            param = masters[name.replace("ema", "param")]
            assert torch.allclose(values, param, rtol=1e-6, atol=1e-8), name
    elif number:
        there, here = (whole_states(each, only="ema") for each in (training, loaded))
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in there)


def test_swapping_twice_changes_nothing() -> None:
    one, other = torch.arange(_SWAPPED + 3.0), -torch.arange(_SWAPPED + 3.0)
    before = one.clone(), other.clone()
    swap(one, other)
    assert torch.equal(one, before[1])
    assert torch.equal(other, before[0])


def test_nothing_is_evaluated_before_the_first_average() -> None:
    config, training = built(f"{FLAGS} --ema-start 3 --global-batch-size 2")
    state, source = begun(config, training)
    for has_average in (False, False, True):
        train_step(training, state, source)
        found = evaluate(training, _held_out(config, training), 2)
        assert (found.ema_loss is not None) is has_average


def _held_out(config: RunConfig, training: Training) -> Iterator[Batch]:
    state, _ = begun(config, training)
    return build_sources(config, build_data(config), training, state).valid[0].batches


def test_averages_are_saved_without_moments_too(tmp_path: Path) -> None:
    """A run with --ema-decay ends with its averages, so --no-save-optim must keep them."""
    config, training = built(f"{FLAGS} --global-batch-size 2 --no-save-optim --save {tmp_path}")
    state, source = begun(config, training)
    for _ in range(2):
        train_step(training, state, source)
    save_run(config, training, state=state)
    assert written_bytes(tmp_path) == checkpoint_bytes(
        config.spec, has_base=False, has_moments=False
    )
    tensors = open_native(tmp_path, averaged=True).tensors
    for name, values in whole_states(training, only="ema").items():
        saved = tensors[name.removeprefix("ema.")]
        assert torch.equal(saved.rows(0, len(values)), values), name


AVERAGED = [
    ("GGG", ""),
    ("IIG", "--bf16 --optimizer muon --paro-updated-ahead 2"),
    (
        "NIG",
        "--bf16 --paro-inter-param-bits 4 --paro-inter-bits-warmup-iters 0 --hidden-size 96 "
        "--ffn-hidden-size 160",
    ),
    ("III", "--paro-materialize rotate"),
]


def _bits(training: Training) -> list[Tensor]:
    """All that a rank holds of parameters and optimizer states, as copies."""
    training.model.wait_for_updated_params()
    held = [unit.param_shard for unit in training.model.units]
    held += [shard.values for shard in training.optimizer.flat_shards()]
    return [values.detach().clone() for values in held]


def evaluate_averages(cases: Sequence[tuple[str, str]]) -> None:
    """Evaluates the averages of each case on this rank, then as parameters of a model."""
    for letters, more in cases:
        label = f"{letters} {more}"
        config, training = built(
            f"{FLAGS} --global-batch-size 8 --paro-strategy {letters} --paro-group-size 2 {more}"
        )
        optimizer = training.optimizer
        copies = [unit.optim_param for unit in optimizer._parts if unit.quantized_update]
        predicted = sum(unit.spec.sent_param_bytes for unit in optimizer._parts)
        assert predicted == sum(copy.nbytes for copy in copies), f"{label}: copied meanwhile"
        assert (predicted > 0) is ("param-bits" in more)
        state, source = begun(config, training)
        usual = [train_step(training, state, source).sent for _ in range(2)]
        before = _bits(training)
        found = evaluate(training, _held_out(config, training), 2)
        for was, now in zip(before, _bits(training), strict=True):
            assert torch.equal(was, now), label
        assert train_step(training, state, source).sent == usual[1], label
        training.model.wait_for_updated_params()
        # Averages after the second step again, as the only weights.
        states = {shard.state: [] for shard in optimizer.flat_shards()}
        for values, was in zip(
            optimizer.flat_shards(), before[len(training.model.units) :], strict=True
        ):
            states[values.state].append(was)
        for (unit, part), average in zip(optimizer._parts.items(), states["ema"], strict=True):
            part.master.detach().copy_(average)
            unit.optim_param.copy_(average)
        optimizer.loaded(num_steps=2)
        alone = evaluate(training, _held_out(config, training), 2)
        assert alone.ema_loss is None, "nothing is averaged in what was loaded"
        assert found.ema_loss == alone.loss != found.loss, (label, found, alone)
        training.close()


@pytest.mark.ranks
def test_an_evaluation_of_averages_leaves_no_bit_and_no_byte_behind() -> None:
    run_ranks(evaluate_averages, 4, AVERAGED)


OFFLOAD = "--optimizer-cpu-offload"
BF16 = PrecisionConfig(compute="bf16")
# Strategies with flags: moments in bf16 and part of the units, masters that are parameters,
# quantized updates, and weights that rotate.
OFFLOADED = (
    ("IIG", "--bf16 --exp-avg-dtype bf16 --optimizer-offload-fraction 0.4"),
    ("NNI", ""),
    ("GGG", "--paro-prefetch-units 0"),
    (
        "NIG",
        "--bf16 --paro-inter-param-bits 4 --paro-inter-bits-warmup-iters 0 --hidden-size 96 "
        "--ffn-hidden-size 160 --param-group names:*.wq lr-mult=3",
    ),
    ("III", "--paro-materialize rotate"),
)


def states_of(
    flags: str, *, save: Path | None = None, load: Path | None = None
) -> dict[str, Tensor]:
    """All states after 4 steps, of which the last 2 resume what was saved after 2."""
    folders = "".join(f" --{k} {v}" for k, v in {"save": save, "load": load}.items() if v)
    config, training = built(f"{flags}{folders}")
    state, source = begun(config, training)
    if load is not None:
        resumed = load_run(config, training, Log(rank=dist.get_rank(), world_size=4))
        assert resumed.state.iteration == 2
        state = resumed.state
        source = build_sources(config, build_data(config, state), training, state).train
    while state.iteration < 4:
        train_step(training, state, source)
        if save is not None and state.iteration == 2:
            save_run(config, training, state=state)
    found = whole_states(training)
    training.close()
    return found


def different(cases: Sequence[tuple[str, str]], folder: Path) -> list[str]:
    """The cases whose bits are others with states in host memory, or after a resumption."""
    wrong = []
    for number, (letters, more) in enumerate(cases):
        flags = f"{TINY} --train-iters 4 --global-batch-size 8 --ema-decay 0.8 {more}"
        flags += f" --paro-strategy {letters} --paro-group-size 2"
        plain = " ".join(flags.split("--optimizer-offload-fraction 0.4"))
        saved, wanted = folder / str(number), states_of(plain)
        for what, found in (
            ("offloaded", states_of(f"{flags} {OFFLOAD}", save=saved)),
            ("resumed", states_of(f"{flags} {OFFLOAD}", load=saved)),
            ("resumed without it", states_of(plain, load=saved)),
        ):
            same = found.keys() == wanted.keys()
            if not (same and all(torch.equal(found[name], wanted[name]) for name in wanted)):
                wrong.append(f"{letters} {more}, {what}")
    return wrong


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [OFFLOADED[:1], pytest.param(OFFLOADED[1:], marks=pytest.mark.verify)],
)
def test_states_in_host_memory_have_the_bits_of_those_on_the_device(
    tmp_path: Path, cases: Sequence[tuple[str, str]]
) -> None:
    for wrong in run_ranks(different, 4, cases, tmp_path, timeout=250):
        assert not wrong


def spec_of(fraction: float = 1.0, letters: str = "GGG", **changes: Any) -> OffloadedStates:
    precision = replace(
        BF16, optimizer_cpu_offload=fraction > 0, optimizer_offload_fraction=fraction or 1.0
    )
    run = run_of(replace(WIDE, num_layers=4), letters, precision, **changes)
    return offloaded(RunMemory(None).specs(run))


def test_the_last_units_that_hold_the_share_are_offloaded() -> None:
    whole = spec_of()
    assert whole.numbers == (0, 1, 2, 3, 4, 5)
    assert spec_of(0.0) == OffloadedStates()
    run = run_of(replace(WIDE, num_layers=4), "GGG", BF16)
    states = RunMemory(None).states(run)
    assert whole.host_bytes == states.optim
    sizes = [spec.optimizer_bytes for spec in RunMemory(None).specs(run)]
    for fraction, numbers in ((1e-9, (5,)), (sum(sizes[3:]) / sum(sizes), (3, 4, 5))):
        found = spec_of(fraction)
        assert found.numbers == numbers
        assert found.host_bytes == sum(sizes[n] for n in numbers)
        slots = [sizes[n] for n in numbers]
        assert sum(found.slots) == sum(max(slots[at::2], default=0) for at in range(2))
    heads = spec_of(is_trained=lambda name: not name.startswith("head."))
    assert heads.numbers == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_slots_are_those_of_the_description(
    monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """Also where a mutation gives the description one more."""
    monkeypatch.setattr(offload, "NUM_SLOTS", num_slots)
    _, training = built(f"{TINY} --train-iters 1 {OFFLOAD}")
    own = offloaded([unit.spec for unit in training.model.units])
    slots = tuple(slot.values.nbytes for slot in training.optimizer._offload._slots)
    assert slots == own.slots
    assert len(slots) == num_slots
    hosted = training.optimizer._offload.of_units.values()
    blocks = {next(iter(s.at_rest.values())).untyped_storage().nbytes() for s in hosted}
    assert blocks == {own.host_bytes}


def test_a_gpus_memory_has_slots_instead_of_states() -> None:
    """And a CPU rank's has both, as its memory is the host's."""
    offloading = replace(BF16, optimizer_cpu_offload=True)
    for device_type, saved in (("cuda", 1), ("cpu", 0)):
        plain, other = (
            run_of(WIDE, "IIG", precision, device_type=device_type)
            for precision in (BF16, offloading)
        )
        memories = RunMemory(None)
        own = offloaded(memories.specs(other))
        of_plain, of_other = memories.states(plain), memories.states(other)
        assert of_plain.optim - of_other.optim == saved * own.host_bytes
        snapshot = memories.tally(other).at("the update", updated=1)
        in_slots = snapshot.with_copies(other, memories.specs(other))
        assert in_slots.total - snapshot.total == sum(own.slots) > 0
        assert snapshot.with_copies(plain, memories.specs(plain)) == snapshot


def test_a_step_takes_longer_by_the_bytes_over_pcie() -> None:
    request = plan_request(machine=machine(world_size=8, group_size=4), precision=BF16)
    device = replace(request.machine.device, host_bytes_per_second=1e9)
    request = replace(request, machine=replace(request.machine, device=device))
    offloading = replace(request, precision=replace(BF16, optimizer_cpu_offload=True))
    candidate = request.candidate(request.strategy("IIG"))
    plain, other = (Estimator(each).estimate(candidate) for each in (request, offloading))
    own = offloaded(Estimator(offloading).costs(candidate).comm_costs.specs)
    seconds = (own.host_bytes + sum(own.slots) / 2) / 1e9
    assert other.seconds - plain.seconds == pytest.approx(seconds)
    assert (plain.host_bytes, other.host_bytes) == (0, own.host_bytes)
    tables = [rows_table(offloading, rows) for rows in ((plain,), (plain, other))]
    assert ["host GB" in table for table in tables] == [False, True]
    assert Estimator(offloading).costs(candidate).least_seconds() <= other.seconds


def test_norms_and_checks_read_states_in_host_memory() -> None:
    _, training = built(f"{TINY} --train-iters 1 {OFFLOAD} --optimizer-offload-fraction 0.3")
    shards = [shard for shard in training.optimizer.flat_shards() if shard.state == PARAM]
    assert not_finite(shards, training.control) is None
    shards[-1].values.detach()[0] = float("nan")
    assert not_finite(shards, training.control) == "param.head.weight on rank 0"
    assert square_sum([torch.ones(5)], torch.device("meta")).device.type == "meta"


def test_a_range_that_is_computed_for_a_norm_is_freed_before_the_next() -> None:
    earlier: list[ref[Tensor]] = []

    def computed() -> Tensor:
        assert all(each() is None for each in earlier)
        values = torch.ones(ROW + 1)
        earlier.append(ref(values))
        return values

    square = square_sum((computed() for _ in range(3)), torch.device("cpu"))
    assert square == pytest.approx(3 * (ROW + 1))
