"""A dry run prints what a real run would, lists a step, checks files, and starts nothing."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.fingerprint import Fingerprint
from paro.checkpoint.directory import (
    COMMON,
    TRACKER,
    begin_checkpoint,
    finish_checkpoint,
    remove_folder,
)
from paro.checkpoint.manifest import MANIFEST
from paro.distributed.control import Control
from paro.distributed.world import World
from paro.launch.dry_run import RunPrediction, predict_run, run_dry
from paro.launch.placement import placement_lines
from paro.launch.prediction import planned_step
from paro.planning.estimator import Estimator
from paro.text import size_text
from paro.training.assembly import build_training
from paro.training.in_memory import in_memory_bytes
from tests.helpers.corpora import write_corpus
from tests.helpers.ranks import ROOT
from tests.helpers.refusals import refused, says
from tests.helpers.training import configured

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--vocab-size 100 --tokenizer-type NullTokenizer --distributed-backend gloo "
    "--micro-batch-size 2 --train-iters 10 --lr 0.1"
)
MOCK = f"{SMALL} --mock-data"
HUGE = (
    "--llama-preset 65B --mock-data --seq-length 2048 --micro-batch-size 2 --lr 1e-4 --bf16 "
    "--global-batch-size 2048 --train-iters 100 --recompute-granularity full"
)


def planned(words: str) -> RunPrediction:
    return predict_run(configured(words))


def run(words: str) -> None:
    run_dry(configured(words))


def printed(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    run(words)
    return capsys.readouterr().out


# Output


@pytest.mark.parametrize(
    "words", ["--paro-strategy IIG", "--bf16 --skip-train", "--trainable last-blocks:0.5"]
)
def test_one_rank_is_planned_as_it_is_built(words: str) -> None:
    plan = planned(f"{MOCK} {words} --dry-run --world-size 1")
    control = Control(World(), torch.device("cpu"))
    real = build_training(plan.config, control)
    assert placement_lines(plan.config, plan.training) == placement_lines(plan.config, real)
    assert plan.training.optimizer.model_state_bytes() == real.optimizer.model_state_bytes()
    for there, here in zip(plan.training.model.units, real.model.units, strict=True):
        assert there.layout == here.layout
        assert there.param_shard.shape == here.param_shard.shape
        assert there.grad_shard.shape == here.grad_shard.shape
        assert there.param_shard.is_meta


def test_it_says_what_a_rank_holds_and_sends(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{MOCK} --bf16 --global-batch-size 64 --paro-strategy IIG --seed 77"
    out = printed(f"{flags} --dry-run --world-size 8 --ranks-per-node 4", capsys)
    answer = (
        "> dry run of 8 ranks on 2 nodes of 4, gloo\n"
        "> the launch is sound; nothing was started and nothing written\n"
        "> memory of a rank: "
    )
    assert out.startswith(answer)
    assert out.index("> sent by a rank") < out.index("--- arguments ---")
    # 2 x 128 x 64, 4 x (4 x 64 x 64 + 3 x 64 x 128 + 2 x 64) and 64
    assert "> model: 180,800 parameters, 4 layers, " in out
    assert "> strategy: IIG, 8 ranks in groups of 4, collectives native\n" in out
    assert "grads      I      4       2       0-3 4-7" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("embedding", "blocks"))]
    assert rows[0] == ["embedding", "8,192", "2,048", "2,048", "1,024"]
    assert rows[1] == ["blocks.0", "..", "blocks.3", "41,088", "10,272", "10,272", "5,136"]
    assert re.search(r"^> memory of a rank: \d\.\d MB at most, at the ", out, re.M)
    # Units padded to a multiple of 64 elements, blocks gathered twice: in bf16, 3/4 inside
    gathered, trained = 2 * 8192 + 8 * 41088 + 64, 2 * 8192 + 4 * 41088 + 64
    inside = 4 * (gathered + trained) * 2 * 3 / 4
    between = 2 * trained * 2 / 4 / 2
    sent = f"{inside / 1e6:.1f} MB inside its group, {between / 1e3:.1f} kB between groups\n"
    assert f"> sent by a rank in a step: {sent}" in out


def test_it_names_the_checkpoint_that_a_training_would_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{MOCK} --dry-run --world-size 1 --load {tmp_path}"
    assert f"> --load {tmp_path}: no checkpoint on this machine\n" in printed(words, capsys)
    for iteration in (1, 2, 3):
        finish_checkpoint(begin_checkpoint(tmp_path, iteration), iteration, {})
    (tmp_path / "iter_0000003" / COMMON).write_text("{")
    (tmp_path / "iter_0000002" / MANIFEST).unlink()
    passed = f"passing over iteration {{}}: {tmp_path}/iter_000000{{}}/{{}}"
    message = (passed.format(3, 3, COMMON), passed.format(2, 2, MANIFEST))
    says(printed(words, capsys), f"> --load {tmp_path}: holds iter_0000001", *message)
    (tmp_path / TRACKER).unlink()
    says(printed(words, capsys), "holds iter_0000001", f"{TRACKER} is missing")
    refused(lambda: run(f"{words} --ckpt-step 2"), "manifest.json ... another --ckpt-step")
    remove_folder(tmp_path / "iter_0000001")
    refused(lambda: run(words), f"{TRACKER} is missing; no checkpoint there is whole")


# Refusals


def test_too_little_memory_says_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{HUGE} --dry-run --world-size 16 --device-memory-gb 80 --paro-strategy ddp"
    lower = "more than --device-memory-gb 80: lower --micro-batch-size, or spread more by"
    message = refused(lambda: run(words), f"1243.3 GB at the reduction of blocks.79 ... {lower}")
    out = capsys.readouterr().out
    assert out.splitlines()[1] == f"> the launch would fail: {message}"
    assert "the launch is sound" not in out


# Blocks as wide as LLaMA-7B's, so that links and memory decide as they do for a user.
PLANNED = (
    "--llama-preset 7B --num-layers 8 --mock-data --seq-length 512 --micro-batch-size 4 "
    "--global-batch-size 256 --train-iters 10 --lr 1e-4 --bf16 --dry-run --world-size 32 "
    "--paro-machine dgx-a100-roce100"
)
RECOMPUTE = "--recompute-granularity full --recompute-num-layers 3"


def test_the_planner_predicts_the_memory_that_the_launch_does() -> None:
    for words in (
        "--paro-strategy NNN --paro-prefetch-units 0",
        "--paro-strategy IIG --distributed-backend gloo --grad-reduce-in-bf16",
        "--paro-strategy 2,8,32 --recompute-granularity full",
        "--paro-strategy IIG --paro-materialize rotate --paro-rotate-in-place",
        f"--paro-strategy GGG --trainable last-blocks:0.25 {RECOMPUTE}",
    ):
        plan = planned(f"{PLANNED} {words}")
        assert plan.config.memory == Estimator(plan.request).memory(plan.launch.candidate)


@pytest.mark.parametrize("flags", ["GGG", "IIG --context-parallel-size 16"])
def test_a_run_expects_the_time_of_a_step_that_its_dry_run_says(flags: str) -> None:
    plan = planned(f"{PLANNED} --paro-strategy {flags}")
    expected, seconds = planned_step(plan.config), plan.launch.seconds
    assert (expected.machine, expected.global_batch_size) == ("dgx-a100-roce100", 256)
    assert expected.seconds["step"] == seconds
    parts = sum(part for name, part in expected.seconds.items() if name != "step")
    assert parts == pytest.approx(seconds, rel=1e-6)
    assert (expected.seconds.get("context", 0.0) > 0.0) is ("context" in flags)


def test_what_leaves_too_little_for_nccl_does_not_fit() -> None:
    plan = planned(f"{PLANNED} --paro-strategy III")
    between = (plan.config.memory.allocated + plan.config.memory.total) // 2
    less = replace(plan.request, memory_bytes=between)
    assert (plan.fits, replace(plan, request=less).fits) == (True, False)
    assert not Estimator(less).estimate(plan.launch.candidate).fits


def test_the_largest_step_of_a_schedule_decides_the_memory() -> None:
    """A plan times the last batch, here of one micro-batch, after which no gradient waits."""
    longer = PLANNED.replace("--seq-length 512", "--seq-length 2048 --paro-strategy GGG")
    words = longer.replace("--global-batch-size 256", "--step-batch-size-schedule 0:512,64K:128")
    plan = planned(words)
    alone = Estimator(replace(plan.request, largest_batch_size=0)).memory(plan.launch.candidate)
    assert alone.total < plan.config.memory.total
    assert plan.launch.num_micro_batches == 1
    assert plan.launch.memory == plan.config.memory == planned(longer).config.memory


@pytest.mark.slow("searches all candidates of a model")
def test_the_plan_for_a_machine_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(f"{PLANNED} --paro-strategy NII", capsys)
    step = r"^> a step on machine dgx-a100-roce100 takes \d\S+ m?s, \S+ tokens/s, MFU \d+\.\d%\n> "
    assert re.search(step + r"\d+\.\d% faster there, and it fits: .*, micro-batches of", out, re.M)
    assert re.search(r"^> plan: NII, micro-batches of 4, native, .* computes for \d", out, re.M)
    best = r"^> planner: of all candidates that fit the best is"
    assert re.search(best + r" .*, micro-batches of \d+", out, re.M)
    assert re.search(r"^> planner: the runner-up", out, re.M)
    alone = printed(f"{PLANNED} --paro-strategy III --paro-outer-steps 30", capsys)
    assert re.search(r"^>   a round takes \S+ m?s, of which", alone, re.M)
    assert re.search(best + r" [NI]{3}, micro-batches of", alone, re.M)
    without = printed(f"{MOCK} --dry-run --world-size 8", capsys)
    assert "> --paro-machine NAME would say how long a step takes" in without


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    words = f"{MOCK} --dry-run --world-size 4"
    refused(lambda: run(words), "--dry-run is one plain process, here are 2")


def test_an_evaluation_counts_where_it_needs_the_most() -> None:
    flags = f"{MOCK} --global-batch-size 64 --dry-run --world-size 1"
    step = planned(flags).config.memory
    assert planned(f"{flags} --eval-micro-batch-size 1").config.memory == step
    large = planned(f"{flags} --eval-micro-batch-size 64").config.memory
    assert large.name.endswith("in an evaluation (--eval-micro-batch-size 64)")
    assert large.total > step.total
    assert large.allocations.states == step.allocations.states, "the optimizer's state stays"
    assert large.allocations.activations == 0, "nothing is kept for a backward"
    assert planned(f"{flags} --eval-micro-batch-size 64 --eval-iters 0").config.memory == step


def test_local_copies_take_memory_of_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    for strategy, more, bytes_of_element in (
        ("NNI", "", 12),  # each node holds everything once
        ("IIG", "", 6),
        ("IIG", "--bf16 --paro-inter-param-bits 4", 7),  # also the parameters as they were sent
    ):
        local = f"--non-persistent-ckpt-type local {more} --paro-strategy {strategy}"
        words = f"{MOCK} {local} --dry-run --world-size 8 --ranks-per-node 4"
        plan = planned(words)
        numel = sum(p.numel() for p in plan.training.model.model.parameters())
        found = in_memory_bytes(plan.config.world.ranks_per_node, plan.training)
        assert found == pytest.approx(2 * bytes_of_element * numel, rel=0.02)
        line = f"> local copies every iteration: {size_text(found)} of the memory of each node"
        assert line in printed(words, capsys)


def test_the_folder_of_save_hf_has_no_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{MOCK} --save-hf {tmp_path / 'hf'} --save-hf-dtype bf16 --dry-run --world-size 8"
    numel = sum(p.numel() for p in planned(words).training.model.model.parameters())
    padding = 2 * (128 - 100) * 64  # of the embedding and the output layer
    line = f"> --save-hf {tmp_path / 'hf'}: {size_text(2 * (numel - padding))} in 1 file at the end"
    assert line in printed(words, capsys)
    assert [*tmp_path.iterdir()] == []


# The listing of a step, and files

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


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(
        r"^```bash\npython pretrain_llama.py (.*?--show-step)\n```\n\n```\n(.*?)^```$",
        page,
        re.M | re.S,
    )
    command, output = found.groups()
    assert f"\n{output}> " in printed(" ".join(shlex.split(command)), capsys)


@pytest.mark.slow("profiles a rank's memory")
@pytest.mark.parametrize(
    "words", [PAIRS, f"{BITS} --lora-rank 4", f"{ROTATE} --paro-rotate-in-place"]
)
def test_the_largest_total_is_the_need(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    totals = [line.split()[-1] for line in listing(f"{IIG} {words}", capsys)[4:]]
    found = max(float(t.replace(",", "")) for t in totals if re.fullmatch(r"[\d,]+\.\d", t))
    assert found == round(planned(f"{IIG} {words}").config.memory.allocated / 1e6, 1)


# Files: what is on this machine is checked, and what is not is told


def test_a_corpus_here_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        ("--vocab-file nowhere --merge-file nowhere", False),
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
    message = f"> tokenizer: none on this machine; a vocabulary of {rows:,} instead\n"
    assert (message in out) is not is_here
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
