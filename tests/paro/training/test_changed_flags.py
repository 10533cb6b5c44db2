"""The messages if a run continues with other flags than it was saved with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paro.config.run import RunConfig
from paro.distributed.world import World
from paro.training.assembly import build_data
from paro.training.changed_flags import order_changes, order_record, schedule_change
from paro.training.step import TrainState
from tests.helpers.corpora import write_conversations, write_corpus
from tests.helpers.refusals import says
from tests.paro.config.test_run import configure

TINY = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --micro-batch-size 1 --lr 0.1 --eval-iters 0"
)
FLAGS = "--seq-length 8 --split 9,1,0 --seed 1 --global-batch-size 4 --train-iters 10"


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` and `b`, and `moved/a`, a copy of `a`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved").mkdir()
    for name, documents in (("a", 20), ("b", 30), ("moved/a", 20)):
        write_corpus(name, [[range(20)]] * documents)
    write_conversations("talks", [(range(20), [0, 1] * 10)] * 20)


def run(words: str) -> RunConfig:
    return configure(f"{TINY} {words}", World())


def order_of(config: RunConfig, state: TrainState | None = None) -> dict[str, Any]:
    return order_record(config.data, config.train, config.batches, build_data(config, state))


def saved(words: str) -> dict[str, Any]:
    """The arguments of such a run in its checkpoint."""
    config = run(words)
    common = {"schedule": asdict(config.schedule), "order": order_of(config)}
    return json.loads(json.dumps(common | {"state": {"consumed_train_samples": 12}}))


def changed(common: dict[str, Any], config: RunConfig) -> str | None:
    return schedule_change(common, config.schedule, config.train, config.batches)


def notices(common: dict[str, Any], words: str) -> list[str]:
    config, consumed = run(words), common["state"]["consumed_train_samples"]
    start = TrainState.at_start(config.loss_scale)
    state = replace(start, iteration=consumed // 4, consumed_train_samples=consumed)
    return list(order_changes(common, order_of(config, state)))


TAIL = "reading continues after sample 12 of another order"
TALKS, APART = "--data-path talks", "--reset-position-ids --reset-attention-mask"
A, B = "a (400 tokens)", "b (600 tokens)"


def test_a_flag_that_changes_the_order_is_named() -> None:
    for before, after, change in (
        ("--seed 1", "--seed 2", "was 1 and is 2 ... shuffled in another way"),
        ("--split 9,1,0", "--split 8,2,0", "was 9,1,0 and is 8,2,0 ... validation and test"),
        ("--data-path a", "--data-path b", f"{A} and are --data-path {B}"),
        ("--data-path .5 a .5 b", "--data-path .2 a .8 b", f"0.5 {A}, 0.5 {B} ... 0.2 {A}"),
        (f"--sft {TALKS}", f"{APART} {TALKS}", "was True and is False ... cut into samples"),
        ("--train-iters 10", "--train-iters 20", "was 10 and is 20 ... epochs"),
        ("--global-batch-size 4", "--global-batch-size 8", "was 4 and is 8 ... epochs"),
    ):
        words = FLAGS if before.startswith("--data-path") else f"{FLAGS} --data-path a"
        common = saved(f"{words} {before}")
        assert notices(common, f"{words} {before}") == []
        (line,) = notices(common, f"{words} {after}")
        says(line, f"{before.split()[0]} {change} ... {TAIL}")


def test_what_leaves_the_order_as_it_was_is_not_told() -> None:
    for before, after in (
        ("a", "moved/a"),
        ("a", "a --split 90,10"),
        ("a", "a --train-iters 11 --micro-batch-size 2 --num-workers 0"),  # no other epochs
        ("0.3 a 0.7 b", "3 a 7 b"),
    ):
        words = f"{FLAGS} --data-path"
        assert notices(saved(f"{words} {before}"), f"{words} {after}") == []


def of_phases(samples: int, first: str, second: str) -> str:
    phases = [{"name": "one", "samples": samples, "data": first}, {"name": "two", "data": second}]
    Path("phases.json").write_text(json.dumps(phases))
    return f"{FLAGS.replace('--split 9,1,0', '')} --data-phases phases.json"


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ((9, "a", "b"), (9, "a", "b"), None),
        ((9, "a", "b"), (9, "b", "b"), None),  # a phase that is over
        ((9, "a", "b"), (9, "a", "a"), f"{B} and are --data-phases {A}"),
        ((9, "a", "b"), (8, "a", "b"), "--data-phases: ... sample 9, now after 8"),
        ((20, "a", "b"), (20, "a", "a"), None),  # a phase that has not begun
        ((20, "a", "b"), (12, "a", "a"), None),  # a phase that ends here
        ((20, "a", "b"), (30, "a", "b"), None),
        ((20, "a", "b"), (20, "b", "b"), f"{A} and are --data-phases {B}"),
    ],
)
def test_a_change_of_the_phase_that_is_read_is_named(
    before: tuple[int, str, str], after: tuple[int, str, str], change: str | None
) -> None:
    common = saved(of_phases(*before))
    lines = notices(common, of_phases(*after))
    assert len(lines) == (change is not None)
    says(" ".join(lines), change or "")


def test_a_run_that_is_complete_has_changed_nothing() -> None:
    words = of_phases(20, "a", "b")
    common = saved(words)
    common["state"]["consumed_train_samples"] = 40
    assert notices(common, words) == []


def test_a_corpus_that_was_written_again_is_noticed() -> None:
    common = saved(f"{FLAGS} --data-path a")
    write_corpus("a", [[range(10)], [range(30)]] * 10)
    (line,) = notices(common, f"{FLAGS} --data-path a")
    says(line, f"--data-path {A} ... {TAIL}")


def test_several_changes_are_a_line_each_and_a_long_blend_is_cut_short() -> None:
    common = saved(f"{FLAGS} --mock-data")
    names = " ".join(f"{weight} a" for weight in (1, 2, 3, 4, 5))
    lines = notices(common, f"{FLAGS} --seed 3 --data-path {names}")
    assert [line.split(" was ")[0] for line in lines[:1]] == ["--seed"]
    assert lines[-1].startswith("the training data were --mock-data and are --data-path 0.0666667 ")
    assert ", 2 more;" in lines[-1]


def test_checkpoints_without_a_record_know_epochs_or_nothing() -> None:
    words = f"{FLAGS} --data-path a"
    common = saved(words)
    epochs = common.pop("order")["epochs"]
    assert notices(common, f"{words} --seed 2") == []
    common["train_order"] = epochs
    assert notices(common, f"{words} --seed 2") == []
    (line,) = notices(common, f"{words} --train-iters 20")
    assert line.startswith("the number of samples changed: the data are shuffled for another ")


LENGTH = "it ends after 80 samples instead of 40"
COSINE = "--lr-decay-style cosine"
GROWS = "--start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear"
DECAY = "--lr-warmup-iters 2 --lr-decay-iters 8"


def test_the_flag_that_changed_a_schedule_is_named() -> None:
    for before, after, change in (
        ("", "--train-iters 20", f"--train-iters was 10 and is 20: {LENGTH}"),
        (DECAY, f"{DECAY} --global-batch-size 8", f"--global-batch-size was 4 and is 8: {LENGTH}"),
        ("--lr-warmup-iters 2", "--lr-warmup-iters 3 --train-iters 20", "8 samples and is 12"),
        ("--lr-decay-iters 8", "", "--lr-decay-iters ... was 32 samples and is 40 samples"),
        ("", COSINE, "--lr-decay-style was linear and is cosine"),
        (COSINE, COSINE, None),
        ("--lr-decay-iters 8", "--lr-decay-iters 8 --train-iters 20", None),
        (f"--lr-decay-iters 8 {GROWS}", f"--lr-decay-iters 8 {GROWS} --train-iters 20", LENGTH),
    ):
        words = f"{FLAGS} --mock-data"
        line = changed(saved(f"{words} {before}"), run(f"{words} {after}"))
        assert (line is None) is (change is None)
        says(line or "", change or "")


def test_a_schedule_of_before_there_was_a_record_names_what_it_may_be() -> None:
    common = saved(f"{FLAGS} --mock-data")
    del common["order"]
    longer = run(f"{FLAGS} --mock-data --train-iters 20")
    message = changed(common, longer)
    says(message or "", f"--train-iters, --train-samples or --global-batch-size changed: {LENGTH}")


def test_a_schedule_of_before_there_was_a_flag_has_its_default() -> None:
    words = f"{FLAGS} --mock-data"
    common = saved(words)
    del common["schedule"]["decoupled_lr"], common["schedule"]["decoupled_min_lr"]
    assert changed(common, run(words)) is None
    message = changed(common, run(f"{words} --decoupled-lr 0.2"))
    says(message or "", "--decoupled-lr was not given and is 0.2")
