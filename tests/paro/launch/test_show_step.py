"""A dry run lists a step action by action, and checks the files that are on this machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from data.fingerprint import Fingerprint
from paro.checkpoint.directory import begin_checkpoint, finish_checkpoint
from paro.planning.estimator import Estimator
from paro.planning.sending import Sender
from paro.step.actions import Verb
from paro.topology import Sent
from tests.helpers.corpora import write_corpus
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused
from tests.paro.launch.test_dry_run import MOCK, SMALL, planned, printed, run
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


@pytest.mark.parametrize(
    "words",
    [
        "",
        PAIRS,
        "--lora-rank 4",
        BITS,
        f"{ROTATE} --paro-rotate-in-place",
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
@pytest.mark.parametrize("strategy", ["GGG", "IIG", "NIG"])
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


# Files: what is on this machine is checked, and what is not is told


def test_a_corpus_that_is_here_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = write_corpus(tmp_path / "here", [[range(60)], [range(40)]])
    flags = f"{SMALL} --data-path 1 {here} 2 {tmp_path}/elsewhere --dry-run --world-size 4"
    before = sorted(tmp_path.iterdir())
    out = printed(flags, capsys)
    assert f"> data: {here} holds 100 tokens in 2 documents, with checksums\n" in out
    assert f"> data: {tmp_path}/elsewhere is not on this machine and was not checked\n" in out
    assert sorted(tmp_path.iterdir()) == before


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [[range(600)]])
    words = f"{SMALL} --data-path {tmp_path}/c --dry-run --world-size 4"
    refused(lambda: run(words), "holds token id 599, the vocabulary has 100")


@pytest.mark.parametrize(
    ("flags", "is_here"),
    [
        ("--tokenizer-type NullTokenizer", True),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere.model", False),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere.json", False),
        ("--vocab-file nowhere --merge-file nowhere", False),
        ("", False),
        ("--llama-preset 7B", False),
        ("--padded-vocab-size 128", False),
    ],
)
def test_a_vocabulary_stands_for_a_tokenizer_that_is_not_here(
    flags: str, is_here: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_with = Fingerprint(tokenizer_type="T", file="f", vocab_size=60, digest="")
    corpus = write_corpus(tmp_path / "here", [[range(60)]], made_with=made_with)
    size = "" if "--llama-preset" in flags or "--padded" in flags else "--vocab-size 100"
    common = SMALL.replace("--vocab-size 100 --tokenizer-type NullTokenizer", size)
    words = f"{common} {flags} --data-path {corpus} --dry-run --world-size 2"
    out = printed(words, capsys)
    rows = 32000 if "--llama-preset" in flags else 128 if "--padded" in flags else 100
    told = f"> tokenizer: none on this machine; a vocabulary of {rows:,} instead\n"
    assert (told in out) is not is_here
    assert f"> data: {corpus} holds 60 tokens" in out


def test_without_a_vocabulary_a_missing_tokenizer_is_refused() -> None:
    words = SMALL.replace("--vocab-size 100 --tokenizer-type NullTokenizer", "--data-path text")
    dry = f"{words} --dry-run --world-size 2"
    advice = "give --tokenizer-type NullTokenizer --vocab-size"
    refused(lambda: run(dry), f"--tokenizer-type is missing ... {advice}")
    file = "--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere"
    refused(lambda: run(f"{dry} {file}"), f"--tokenizer-model nowhere cannot be read ... {advice}")
    refused(
        lambda: run(f"{words} {file} --vocab-size 100"), "--tokenizer-model nowhere cannot be read"
    )
    refused(lambda: run(f"{words} --vocab-size 100"), "--tokenizer-type is missing")


def test_checkpoints_that_would_be_mixed_up_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_checkpoint(begin_checkpoint(tmp_path, 5), 5, {})
    words = f"{MOCK} --save {tmp_path} --dry-run --world-size 4"
    refused(lambda: run(words), "holds a checkpoint, iteration 5 ... no --load")
    assert "> the launch would fail: " in capsys.readouterr().out
