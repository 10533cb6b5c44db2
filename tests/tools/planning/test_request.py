"""Requests of a plan, its launch, and the longest sequences that fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from paro.arguments.flag_parser import by_flag
from paro.launch.dry_run import RunPrediction, predict_run
from paro.machine.files import find_machine, machine_to_json
from paro.machine.machine import Nic
from paro.planning.estimator import Estimator
from paro.planning.search_space import PlanRequest, micro_batch_sizes
from paro.spec.context_layout import ContextLayout
from tests.helpers.refusals import measured, printed, refused
from tests.helpers.training import configured
from tests.paro.config.test_refusals import MISTAKES, OF_SHARED_SAMPLES
from tests.paro.config.test_run import SMALL
from tests.paro.planning.cases import machine, plan_request
from tests.tools.test_plan import MEASURED, planned
from tools.plan import main
from tools.planning.outer import outer_lines
from tools.planning.request import make_parser, plan_request_of_args, with_context

KNOWN = make_parser()._option_string_actions.keys()
# What only a training lacks, which has to measure its machine.
OF_MACHINES = ("--paro-collective auto", "--context-parallel-size auto")


def of_plan(words: str) -> bool:
    flags = {flag.partition("=")[0] for flag, *_ in by_flag(shlex.split(words))}
    return flags <= KNOWN and not words.startswith(OF_MACHINES)


def requested(words: str) -> PlanRequest:
    args, _ = with_context(make_parser().parse_args(shlex.split(words)))
    return plan_request_of_args(args)


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        *((4, *row) for row in MISTAKES if of_plan(row[0])),
        *((8, *row) for row in OF_SHARED_SAMPLES if of_plan(row[0])),
    ],
)
def test_what_a_training_refuses_a_plan_refuses(
    ranks: int, words: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_to_json(machine(world_size=ranks, group_size=ranks // 2, inter=20)))
    groups = [shlex.join(group) for group in by_flag(shlex.split(SMALL)) if group[0] in KNOWN]
    flags = f"{' '.join(groups)} --paro-machine {path}"
    requested(flags)
    refused(lambda: requested(f"{flags} {words}"), message)


def test_micro_batches_are_such_as_fp8_takes() -> None:
    given = plan_request(seq_length=8, global_batch_size=4 * 32)
    assert micro_batch_sizes(given) == (1, 2, 4)
    in_fp8 = replace(given, model=replace(given.model, fp8_format="e4m3"))
    assert micro_batch_sizes(in_fp8) == (2, 4)


FLAGS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 --bf16 "
    "--seq-length 256 --paro-machine dgx-h100 --world-size 8 --device-memory-gb 20"
)


def rows(flags: str) -> list[list[str]]:
    lines = printed(main, *FLAGS.split(), "--longest-sequence", *flags.split()).splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[1:]]


def needs(length: int, layout: ContextLayout) -> int:
    given = requested(FLAGS)
    own = replace(
        given,
        model=replace(given.model, max_position_embeddings=length),
        seq_length=length,
        context=layout,
        global_batch_size=8 // layout.size,
    )
    return Estimator(own).memory(own.candidate(own.strategy("GGG"))).total


def test_the_longest_fits_and_hardly_more_does() -> None:
    of_ggg = [row for row in rows("--cp-comm-type a2a") if "GGG" in row[0]]
    found = {row[1]: int(row[-4].replace(",", "")) for row in of_ggg}
    assert [*found] == ["1", "2", "4", "8"]
    for ranks, length in found.items():
        layout = ContextLayout(size=int(ranks), heads=int(ranks))
        assert needs(length, layout) <= 20_000_000_000 < needs(length * 102 // 100 + 1024, layout)
    assert all(more > 1.8 * less for less, more in pairwise(found.values()))


def test_a_strategy_under_which_nothing_fits_is_told() -> None:
    words = [*FLAGS.split(), "--longest-sequence", "--device-memory-gb", "1.6"]
    table, *none = printed(main, *words).split("\nNNI=NNG: not even 1,024 tokens fit\n")
    assert table.splitlines()[-1].startswith("NNN ")
    assert len(none) == 1


SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --bf16"
TOKENS = "--vocab-size 1000 --global-batch-size 64 --world-size 16"
MODEL = f"{SIZES} {TOKENS}"


def test_outer_steps_share_no_sample_between_groups() -> None:
    nodes = "--gpu h100 --gpus-per-node 4 --inter 25gbit --world-size 8 --global-batch-size 8"
    for size, message in ((8, "--context-parallel-size 8 does not fit: "), (4, " s a step and ")):
        words = f"{MODEL} {nodes} --context-parallel-size {size} --paro-outer-steps 9"
        args = make_parser().parse_args(words.split())
        first, *_ = outer_lines(args, plan_request_of_args(args), None)
        assert message in first


def dry_run(lines: list[str]) -> RunPrediction:
    """The dry run among the lines of a launch, as bash would start it."""
    begin, end = lines.index("FLAGS=("), lines.index(")")
    flags = shlex.split(" ".join(lines[begin + 1 : end]))
    (command,) = (line for line in lines if line.startswith("python pretrain_llama.py "))
    program, array, *words = shlex.split(command)[1:]
    assert (program, array) == ("pretrain_llama.py", "${FLAGS[@]}")
    return predict_run(configured([*flags, *words]))


LAUNCHES = (
    f"{MEASURED} --paro-collective auto",
    f"{MODEL} --paro-machine dgx-h100 --paro-materialize rotate --paro-rotate-in-place",
    f"{MODEL} --paro-machine a800-ib800 --paro-survive 1 --trainable last-blocks:0.5",
    f"{MODEL} --paro-machine=dgx-a100-roce100 --paro-inter-bits auto --seq-length=512",
    f"{MODEL} --gpu h100 --gpus-per-node 4 --inter 25gbit --world-size 8 --global-batch-size 4 "
    "--context-parallel-size auto --cp-comm-type auto",
    "--llama-preset 7B --num-layers 2 --seq-length 4096 --bf16 --gpu a100 --gpus-per-node 2 "
    "--recompute-activations --paro-prefetch-units 2",
)


@pytest.mark.slow("searches all candidates of a model, and builds it")
@pytest.mark.parametrize(
    "flags",
    [*LAUNCHES[:2], *(pytest.param(flags, marks=pytest.mark.verify) for flags in LAUNCHES[2:])],
)
def test_a_launch_is_the_choice_of_its_plan(tmp_path: Path, flags: str) -> None:
    if "--gpu" in flags:
        flags += f" --machine-file {tmp_path}/machine.json"
    fields = planned(flags)
    best, run = fields["best"], dry_run(fields["launch"])
    chosen, degrees = run.launch.candidate, list(run.config.strategy.degrees)
    assert degrees == best["degrees"]
    assert (chosen.collective, run.fits) == (best["collective"], True)
    assert run.launch.seconds == pytest.approx(best["step_seconds"])
    assert run.config.memory.total == pytest.approx(best["memory_bytes"], rel=1e-3)
    assert run.launch.sent.inter == best["inter_bytes"]


@pytest.mark.slow("searches all candidates of a model")
def test_a_machine_of_three_figures(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine = "--gpu h100 --gpus-per-node 4 --inter 25gbit --intra 64gbit"
    few = "--micro-batch-size 1 --paro-collective native"
    planned(f"{MODEL} {few} {machine} --machine-file {path}")
    made, shipped = find_machine(str(path)), find_machine("dgx-h100")
    assert (made.world_size, made.group_size, made.nic) == (16, 4, Nic.SHARED)
    assert made.intra.bits_per_second == 64e9
    assert made.inter.bits_per_second == 25e9
    assert made.device == shipped.device
    assert dict(made.sources)["links.inter.bandwidth"] == "--inter 25gbit"
    assert dict(made.sources)["device.sustained_flops"] == "an assumption: 0.45 of the peak"
    of_two = machine.partition(" --intra")[0]
    planned(f"{MODEL} {few} {of_two} --nic per-rank --machine-file {path}")
    per_rank = find_machine(str(path))
    assert (per_rank.nic, per_rank.intra) == (Nic.PER_RANK, shipped.intra)


def why_not(strategy: str, more: str = "") -> list[str]:
    """The two lines of an answer, and the degrees of the best."""
    slow = f"{MODEL} --gpu a100 --gpus-per-node 4 --inter 1gbit --device-memory-gb 4"
    slow += " --micro-batch-size 1 --paro-collective native"
    out, fields = measured(main, *f"{slow} {more} --why-not {strategy}".split())
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"why not {strategy}"))
    assert lines[first + 2] == ""
    degrees = ",".join(map(str, fields["best"]["degrees"]))
    assert ("it is the best" in lines[first]) is (strategy == degrees)
    return [*lines[first : first + 2], degrees]


@pytest.mark.slow("searches all candidates of a model")
def test_why_another_strategy_is_not_the_best() -> None:
    cost, spends, _ = why_not("zero3")
    slower = re.search(r", is ([\d.]+)% slower: ", cost)
    assert slower
    assert float(slower[1]) > 0
    assert "for gathers, " in spends


@pytest.mark.verify
def test_why_it_is_the_best_or_does_not_fit_or_is_refused() -> None:
    *_, degrees = why_not("zero3")
    why_not(degrees)
    cost, needs, _ = why_not("ddp", "--num-layers 40 --device-memory-gb 4")
    assert "it does not fit, the least is " in cost
    assert "model states " in needs
    cost, reason, _ = why_not("GGG", "--paro-survive 1")
    assert cost == "why not GGG: it is not among the candidates"
    assert reason.startswith("--paro-survive 1: under --paro-strategy GGG no rank may be lost")
