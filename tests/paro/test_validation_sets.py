"""Several validation sets, and evaluations of all validation data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.corpora import write_corpus
from tests.helpers.refusals import refused
from tests.helpers.training import TINY
from tests.paro.training.test_loop import run_loop

CORPUS = TINY.replace("--mock-data ", "").replace("--micro-batch-size 1 ", "")


@pytest.fixture
def flags(tmp_path: Path) -> str:
    for place, name in enumerate(("train", "prose", "code")):
        random = np.random.RandomState(place)
        documents = ([random.randint(0, 59, size=13)] for _ in range(30 - 9 * place))
        write_corpus(tmp_path / name, documents)
    return (
        f"--train-data-path {tmp_path / 'train'} --valid-data-path {tmp_path / 'prose'} "
        f"{tmp_path / 'code'} --train-iters 4"
    )


def test_sets_are_evaluated_one_by_one_under_their_names(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_loop(
        f"{flags} --micro-batch-size 2 --multiple-validation-sets --eval-interval 2 --eval-iters 1",
        base=CORPUS,
    )
    names = ["validation-prose", "validation-code"]
    assert run.evaluated == [(at, name) for at in (2, 4, 4) for name in names]
    assert run.state.consumed_valid_samples == 2 * 2
    assert len(set(run.losses)) == len(run.losses)
    assert "iteration 2 on validation-code set | lm loss value" in capsys.readouterr().out


@pytest.mark.slow("trains several times")
def test_full_validation_is_the_mean_over_every_token(flags: str) -> None:
    """With any batch size: 1 divides the 22 samples of a set, 4 does not."""
    whole = "--full-validation --multiple-validation-sets --skip-train"
    by_one = run_loop(f"{flags} {whole} --micro-batch-size 1", base=CORPUS)
    by_four = run_loop(f"{flags} {whole} --micro-batch-size 4", base=CORPUS)
    assert by_one.losses == pytest.approx(by_four.losses, rel=1e-6)
    assert len(by_one.losses) == 2
    first = run_loop(f"{flags} {whole.split()[1]} --skip-train --micro-batch-size 1 "
                     "--eval-iters 22", base=CORPUS)  # fmt: skip
    assert first.losses[0] == pytest.approx(by_one.losses[0], rel=1e-6)


def test_full_validation_begins_anew_every_time(flags: str) -> None:
    run = run_loop(
        f"{flags} --micro-batch-size 4 --full-validation --eval-interval 1 --lr 1e-30",
        base=CORPUS,
    )
    assert [data_set for _, data_set in run.evaluated] == [None] * 4 + ["validation"]
    assert run.losses == pytest.approx([run.losses[0]] * 5, rel=1e-7)
    assert run.state.consumed_valid_samples == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--mock-data --full-validation", "--full-validation needs a corpus"),
        ("--data-path x --multiple-validation-sets", "needs --valid-data-path"),
        ("--train-data-path x --valid-data-path 1 y 2 z --multiple-validation-sets", "has weights"),
    ],
)
def test_senseless_validation_is_refused(wrong: str, message: str) -> None:
    refused(lambda: run_loop(f"{wrong} --train-iters 1 --micro-batch-size 1", base=CORPUS), message)


def test_weights_and_full_validation_contradict_each_other(flags: str, tmp_path: Path) -> None:
    weighed = flags.replace("--valid-data-path ", "--valid-data-path 1 ").replace(
        f" {tmp_path / 'code'}", f" 2 {tmp_path / 'code'}"
    )
    words = f"{weighed} --micro-batch-size 1 --full-validation"
    refused(lambda: run_loop(words, base=CORPUS), "--valid-data-path ... --full-validation")
