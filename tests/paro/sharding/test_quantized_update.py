"""Quantized updates of parameters: equal bits on every replica, exact bytes, what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paro.quantization.formats import BlockFormat, RangeFormat
from paro.sharding.shards import QuantizedUpdate
from tests.helpers.margins import assert_near
from tests.helpers.ranks import run_ranks
from tests.helpers.resharding import Setting, load_and_go_on, save_and_go_on
from tests.paro.sharding.quantized_runs import SIZES, quantized_run

pytestmark = pytest.mark.bits

FOUR, EIGHT = "--paro-inter-param-bits 4", "--paro-inter-grad-bits 8"
REMEMBERED = "--paro-inter-grad-bits 4 --paro-inter-grad-error-feedback"


def ranges_of(numel: int, matrix_stop: int, *, bits: int = 4, number: int = 1) -> RangeFormat:
    return RangeFormat(
        form=BlockFormat(bits=bits, block=2048),
        numel=numel,
        slice_numel=numel * number,
        matrix_stop=matrix_stop,
        exact_bytes=2,
    )


def test_the_bytes_of_the_longest_range() -> None:
    num_bytes = {
        ranges_of(4096, 4096): 8 + 2048 + 8,  # a multiple of 16
        ranges_of(4096, 4096, bits=8): 8 + 4096 + 8,
        ranges_of(4096, 4000): 8 + 2000 + 2 * 96 + 8,
        ranges_of(4096, 2047): 2 * 4096,  # less than a block of matrices: all exact
        ranges_of(4096, 3 * 4096 + 2048, number=4): 4 + 1024 + 2 * 2048 + 12,  # last one longest
        ranges_of(4096, 3 * 4096, number=4): 2 * 4096,  # the last has no matrices
    }
    assert {ranges: ranges.range_bytes for ranges in num_bytes} == num_bytes


def test_what_is_not_sent_is_sent_later() -> None:
    """The parameters follow masters that stop changing, to within bf16's own rounding."""
    made, generator = ranges_of(5000, 4900), torch.Generator().manual_seed(3)
    master = torch.randn(5000, generator=generator)
    param = torch.zeros(5000, dtype=torch.bfloat16)
    quantized = torch.zeros(made.range_bytes, dtype=torch.uint8)
    update = QuantizedUpdate(made, quantized, param, start=0)
    left = [float(master.norm())]
    for _ in range(6):
        update.quantize(master, param, 0)
        sent = param.clone()
        update.apply()
        assert torch.equal(param, sent), "the owner has its own range at once"
        left.append(float((master - param.float())[:4900].norm()))
        assert torch.equal(param[4900:], master[4900:].bfloat16())
    assert left[1] < 0.2 * left[0]
    assert left[-1] < 1.5 * float((master - master.bfloat16().float()).norm())


@pytest.mark.ranks
def test_a_resumed_run_has_the_same_bits_and_remembers_quantization_errors(tmp_path: Path) -> None:
    """On the same ranks and strategy; on others gradients begin without it."""
    more = f"{SIZES} {FOUR} {REMEMBERED} --paro-inter-bits-warmup-iters 0"
    setting = Setting(world_size=4, group_size=2, strategy="IIG", more=more)
    there = run_ranks(save_and_go_on, 4, setting, tmp_path, asynchronous=True)
    here = run_ranks(load_and_go_on, 4, setting, tmp_path)
    saved, loaded = there[0].states, here[0].states
    assert saved.keys() == loaded.keys()
    for name, values in saved.items():
        assert values.dtype == loaded[name].dtype
        assert torch.equal(values, loaded[name]), name
    sent = {name: values for name, values in saved.items() if name.startswith("sent.")}
    assert len(sent) == len([name for name in saved if name.startswith("param.")])
    rounded = [saved[name.replace("sent.", "param.")].bfloat16() for name in sent]
    assert not all(map(torch.equal, sent.values(), rounded)), "nothing was left to send"
    errors = [values for name, values in saved.items() if name.startswith("grad_errors.")]
    assert len(errors) == 4, "one for each unit"
    assert all(values.any() for values in errors)
    assert here[0].losses == there[0].losses
    moved = run_ranks(load_and_go_on, 4, replace(setting, strategy="NII"), tmp_path)
    forgotten = [v for name, v in moved[0].states.items() if name.startswith("grad_errors.")]
    assert len(forgotten) == 4
    assert not any(values.any() for values in forgotten)
    assert_near(moved[0].losses, there[0].losses, 5e-3, "without the errors of another strategy")


PAIRS = [
    ((6, 3, "IGG", FOUR), (4, 2, "IIG", "--paro-inter-param-bits 8")),
    ((4, 2, "NIG", FOUR), (4, 2, "IIG", "")),
    ((4, 2, "IIG", ""), (6, 2, "NNG", FOUR)),
    ((4, 2, "IIG", FOUR), (8, 2, "2,2,4", FOUR)),
]


@pytest.mark.verify
@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resumed_on_other_ranks_and_with_other_bits(
    tmp_path: Path, before: tuple[int, int, str, str], after: tuple[int, int, str, str]
) -> None:
    settings = [
        Setting(world_size=world, group_size=group, strategy=name, more=f"{SIZES} {more}")
        for world, group, name, more in (before, after)
    ]
    there = run_ranks(save_and_go_on, before[0], settings[0], tmp_path, asynchronous=False)
    here = run_ranks(load_and_go_on, after[0], settings[1], tmp_path)
    saved, loaded = there[0].states, here[0].states
    for name, values in loaded.items():
        source = saved.get(name)
        if source is None:  # saved by a run that sent exactly
            source = saved[name.replace("sent.", "param.")].bfloat16()
        assert torch.equal(values, source), name
    assert_near(here[0].losses, there[0].losses, 5e-3, f"{before} to {after}")


@pytest.mark.parametrize(
    ("coded", "strategy", "line"),
    [
        (FOUR, "4,4,8", "in every micro-batch, in 16 bits; IIG sends them"),
        (FOUR, "III", "no effect under III: its updated parameters are gathered inside groups"),
        (FOUR, "IIG", None),
        (EIGHT, "IGG", "IGG gradients cross groups in every micro-batch, in 16 bits; IIG sends"),
        (EIGHT, "III", None),
    ],
)
def test_what_stays_in_16_bits_is_said(coded: str, strategy: str, line: str | None) -> None:
    notices = quantized_run(f"{coded} --paro-strategy {strategy}").notices
    said = [notice for notice in notices if coded in notice]
    assert len(said) == (line is not None)
    assert line is None or line in said[0]
