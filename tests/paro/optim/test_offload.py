"""Optimizer states in host memory: a training's bits, what is chosen, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paro.optim.finite import not_finite, square_sum
from paro.planning.estimator import Estimator
from paro.planning.run_memory import RunMemory
from paro.precision import PrecisionConfig
from paro.report.log import Log
from paro.spec.offload import Offloaded, offloaded
from paro.spec.states import PARAM
from paro.training.assembly import build_data, build_sources
from paro.training.resume import load_run
from paro.training.step import train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, begun, built, save_run, whole_states
from tests.paro.planning.cases import machine, plan_request
from tests.paro.planning.on_ranks import run_of
from tests.paro.planning.test_units import WIDE
from tools.planning.tables import rows_table

OFFLOAD = "--optimizer-cpu-offload"
BF16 = PrecisionConfig(compute="bf16")
# Strategies with flags: masters that are parameters, moments in bf16, part of the units, quantized
# updates, and weights that rotate.
CASES = (
    ("NNI", ""),
    ("GGG", "--paro-prefetch-units 0"),
    ("IIG", "--bf16 --exp-avg-dtype bf16 --optimizer-offload-fraction 0.4"),
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
        assert resumed.state is not None
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
    "cases", [CASES[2:4], pytest.param((*CASES[:2], CASES[4]), marks=pytest.mark.verify)]
)
def test_states_in_host_memory_have_the_bits_of_those_on_the_device(
    tmp_path: Path, cases: Sequence[tuple[str, str]]
) -> None:
    for wrong in run_ranks(different, 4, cases, tmp_path, timeout=250):
        assert not wrong


def spec_of(fraction: float = 1.0, letters: str = "GGG", **changes: Any) -> Offloaded:
    precision = replace(
        BF16, optimizer_cpu_offload=fraction > 0, optimizer_offload_fraction=fraction or 1.0
    )
    run = run_of(replace(WIDE, num_layers=4), letters, precision, **changes)
    return offloaded(RunMemory(None).specs(run))


def test_the_last_units_that_hold_the_share_are_offloaded() -> None:
    whole = spec_of()
    assert whole.numbers == (0, 1, 2, 3, 4, 5)
    assert spec_of(0.0) == Offloaded()
    run = run_of(replace(WIDE, num_layers=4), "GGG", BF16)
    states = RunMemory(None).states(run)
    assert whole.host_bytes == states.optim
    sizes = [spec.optimizer_bytes for spec in RunMemory(None).specs(run)]
    for fraction, numbers in ((1e-9, (5,)), (sum(sizes[3:]) / sum(sizes), (3, 4, 5))):
        found = spec_of(fraction)
        assert found.numbers == numbers
        assert found.host_bytes == sum(sizes[n] for n in numbers)
        slots = [sizes[n] for n in numbers]
        assert found.slot_bytes == sum(max(slots[at::2], default=0) for at in range(2))
    heads = spec_of(is_trained=lambda name: not name.startswith("head."))
    assert heads.numbers == (0, 1, 2, 3, 4)


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
        assert in_slots.total - snapshot.total == own.slot_bytes > 0
        assert snapshot.with_copies(plain, memories.specs(plain)) == snapshot


def test_a_step_takes_longer_by_the_bytes_over_pcie() -> None:
    request = plan_request(machine=machine(world_size=8, group_size=4), precision=BF16)
    device = replace(request.machine.device, host_bytes_per_second=1e9)
    request = replace(request, machine=replace(request.machine, device=device))
    offloading = replace(request, precision=replace(BF16, optimizer_cpu_offload=True))
    candidate = request.candidate(request.strategy("IIG"))
    plain, other = (Estimator(each).estimate(candidate) for each in (request, offloading))
    own = offloaded(Estimator(offloading).costs(candidate).comm_costs.specs)
    seconds = (own.host_bytes + own.slot_bytes / 2) / 1e9
    assert other.seconds - plain.seconds == pytest.approx(seconds)
    assert (plain.host_bytes, other.host_bytes) == (0, own.host_bytes)
    tables = [rows_table(offloading, rows) for rows in ((plain,), (plain, other))]
    assert ["host GB" in table for table in tables] == [False, True]
    assert Estimator(offloading).costs(candidate).least_seconds() <= other.seconds


def test_norms_and_checks_read_states_in_host_memory() -> None:
    """Norms and checks take states in host memory and on the device together."""
    _, training = built(f"{TINY} --train-iters 1 {OFFLOAD} --optimizer-offload-fraction 0.3")
    shards = [shard for shard in training.optimizer.flat_shards() if shard.state == PARAM]
    assert not_finite(shards, training.control) is None
    shards[-1].values.detach()[0] = float("nan")
    assert not_finite(shards, training.control) == "param.head.weight on rank 0"
    assert square_sum([torch.ones(5)], torch.device("meta")).device.type == "meta"
