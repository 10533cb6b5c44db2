"""--show-step lists a step action by action: words, bytes, streams, memory, equal blocks once."""

from __future__ import annotations

import re
import shlex

import pytest

from paro.planning.estimator import Estimator
from paro.planning.sending import Sender
from paro.step.actions import Verb
from paro.topology import Sent
from tests.helpers.ranks import ROOT
from tests.paro.launch.test_dry_run import planned, printed
from tests.paro.planning.cases import ORDERS, order_case, schedule_of

SIZES = (
    "--hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 8000 --mock-data "
    "--micro-batch-size 1 --lr 0.1 --train-iters 10 --bf16"
)
SHOW = "--dry-run --world-size 16 --show-step"
IIG = f"{SIZES} --num-layers 8 --paro-strategy IIG --global-batch-size 64 {SHOW}"
PAIRS = "--recompute-granularity full --recompute-num-layers 2"
ROTATE = "--paro-materialize rotate"
BITS = "--paro-inter-param-bits 4 --paro-inter-grad-bits 4"


def listing(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the listing, without its columns' alignment."""
    found = re.search(r"^> a step, action by action.*?\n(?=>)", printed(words, capsys), re.M | re.S)
    return [re.sub(r" +", " ", line).strip() for line in found[0].splitlines()]


def section(lines: list[str], begin: str, end: str) -> list[str]:
    """The words of the lines after the one that begins with `begin`, up to `end`."""
    first = next(number for number, line in enumerate(lines) if line.startswith(begin))
    last = next(n for n, line in enumerate(lines) if n > first and line.startswith(end))
    return [re.split(r" [\d,]+\.\d", line)[0] for line in lines[first + 1 : last]]


def test_the_page_of_architecture_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(
        r"^```bash\npython pretrain_llama.py (.*?--show-step)\n```\n\n```\n(.*?)^```$",
        page,
        re.M | re.S,
    )
    command, output = found.groups()
    assert f"\n{output}> " in printed(" ".join(shlex.split(command)), capsys)


# A plain step, of equal blocks once, is on the page.
CASES = {
    "groups of recomputed blocks": (
        PAIRS,
        "backward of blocks.5 to blocks.4, and the same for blocks.3 to blocks.2, each time",
        "BACKWARD blocks.5",
        "free blocks.6 | all-gather blocks.4 | wait for blocks.5 | wait for blocks.4 "
        "| RECOMPUTE blocks.4 | RECOMPUTE blocks.5",
    ),
    "adapters": (
        "--lora-rank 4",
        "forward of blocks.0, and the same for blocks.1 to blocks.6, each time",
        "forward of blocks.7",
        "all-gather blocks.1 | all-gather blocks.1 (frozen) | wait for blocks.0 "
        "| wait for blocks.0 (frozen) | FORWARD blocks.0 | free blocks.0 | free blocks.0 (frozen)",
    ),
    "4 bits between groups": (
        BITS,
        "BACKWARD blocks.7: the rest",
        "backward of",
        "reduce-scatter gradients of blocks.7 | step all-to-all of codes of blocks.7",
    ),
    "updates of 4 bits": (
        f"{BITS} --paro-updated-ahead all",
        "update of blocks.0, and the same for blocks.1 to blocks.7",
        "update of head",
        "UPDATE blocks.0 | all-gather codes of updated blocks.0",
    ),
    "weights rotate": (
        ROTATE,
        "forward of blocks.0.attention to blocks.0.mlp, and the same for blocks.1.attention to "
        "blocks.7.mlp, each time",
        "allocate a slot of blocks.0.mlp",
        "allocate a slot of blocks.0.attention | copy the slice of blocks.0.attention "
        "| send the slice of blocks.0.attention on | FORWARD blocks.0.attention "
        "| wait for the next slice of blocks.0.attention "
        "| send the slice of blocks.0.attention on | the last 3 actions, 5 times more "
        "| FORWARD blocks.0.attention | wait for the next slice of blocks.0.attention "
        "| FORWARD blocks.0.attention | free a slot of blocks.0.attention",
    ),
    "weights rotate in place": (
        f"{ROTATE} --paro-rotate-in-place",
        "backward of blocks.7.mlp",
        "free a slot",
        "allocate a slot of blocks.7.mlp 2/2 | BACKWARD blocks.7.mlp 2/2: to its first gradient "
        "| allocate a slot of blocks.7.mlp 2/2 | BACKWARD blocks.7.mlp 2/2: the rest "
        "| send the slice of blocks.7.mlp 2/2 back | wait for the next slice of blocks.7.mlp 2/2 "
        "| send the slice's gradients of blocks.7.mlp 2/2 back "
        "| wait for the slice's gradients of blocks.7.mlp 2/2 "
        "| BACKWARD blocks.7.mlp 2/2: to its first gradient | the last 6 actions, 6 times more "
        "| BACKWARD blocks.7.mlp 2/2: the rest",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stretch_reads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, begin, end, wanted = CASES[name]
    assert " | ".join(section(listing(f"{IIG} {words}", capsys), begin, end)) == wanted


def test_what_other_micro_batches_do_differently(capsys: pytest.CaptureFixture[str]) -> None:
    updated = ", ".join(f"blocks.{number}" for number in range(1, 8))
    assert listing(IIG, capsys)[-5:] == [
        "the first micro-batch, also: all-gather 2 x embedding, 2 x blocks.0",
        f"the first micro-batch, also: all-gather updated {updated}, head",
        "the first micro-batch, not: step reduce-scatter of all that trains",
        "each between the first and the last, also: all-gather blocks.0, embedding",
        "each between the first and the last, not: step reduce-scatter of all that trains",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--trainable last-blocks:0.5",
        PAIRS,
        "--lora-rank 4",
        BITS,
        "--paro-strategy GGG",
        ROTATE,
        f"{ROTATE} --paro-rotate-in-place",
        f"{ROTATE} {PAIRS}",
        f"{ROTATE} --lora-rank 4",
    ],
)
def test_the_largest_total_is_what_a_rank_needs(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    totals = [line.split()[-1] for line in listing(f"{IIG} {words}", capsys)[4:]]
    found = max(float(t.replace(",", "")) for t in totals if re.fullmatch(r"[\d,]+\.\d", t))
    assert found == round(planned(f"{IIG} {words}").memory.allocated / 1e6, 1)


def test_axes_of_one_kind_are_told_by_their_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listing(IIG.replace("IIG", "2,4,16"), capsys)
    assert any("all-gather blocks.1 " in line and "gather inside 1-2 " in line for line in lines)
    last = next(line for line in lines if line.startswith("step reduce-scatter of head "))
    assert "reduce inside 4-8, between" in last


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("strategy", ["GGG", "IIG", "INI", "NIG", "NNG"])
def test_actions_send_what_a_step_sends(name: str, strategy: str) -> None:
    given = order_case(name)
    estimator, candidate = Estimator(given), given.candidate(given.strategy(strategy))
    step = estimator.costs(candidate)
    run = step.comm_costs.run
    specs, sender = run.specs(step.counts.units), Sender(group_size=run.group_size, rank=None)
    sent = [
        sender.sent(specs[number].collectives.get(verb, ()))
        for verb, number, *_ in schedule_of(step).actions()
        if verb < Verb.FORWARD and verb is not Verb.NORM
    ]
    assert sum(sent, Sent()) == estimator.sent(candidate)


def test_without_training_there_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(f"{IIG} --skip-train", capsys)
    assert "> no step to show: --skip-train trains nothing\n" in out
    assert "FORWARD" not in out
