"""Several validation sets, and evaluations of all validation data."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data.fingerprint import Fingerprint
from tests.helpers.corpora import read_corpus, write_conversations, write_corpus
from tests.helpers.margins import assert_near
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


def test_sets_are_evaluated_one_by_one(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_loop(
        f"{flags} --micro-batch-size 2 --multiple-validation-sets --eval-interval 2 --eval-iters 1",
        base=CORPUS,
    )
    names = ["validation-prose", "validation-code"]
    assert run.evaluated == [(at, name) for at in (2, 4, 4) for name in names]
    assert run.state.consumed_valid_samples == 2 * 2
    assert len(set(run.losses)) == len(run.losses)
    assert "iteration 2 on validation-code set | lm loss value" in capsys.readouterr().out


@pytest.mark.slow("evaluates several times")
def test_validation_is_the_mean_over_answered_tokens_in_any_micro_batches(tmp_path: Path) -> None:
    """One conversation of four is answered within a sample; the last evaluation has none."""
    random = np.random.RandomState(3)
    marks = ([0] * 9 + [1] * 3, [0] * 12, [0] * 20 + [1] * 5, [0] * 12)
    talks = [(random.randint(0, 59, len(each)).tolist(), each) for each in marks]
    write_conversations(tmp_path / "all", talks)
    write_conversations(tmp_path / "one", talks[:1])
    found = []
    for name, more in (
        ("one", "--micro-batch-size 1 --eval-iters 1"),
        ("all", "--micro-batch-size 1 --eval-iters 4"),
        ("all", "--micro-batch-size 1 --eval-iters 4 --calculate-per-token-loss"),
        ("all", "--micro-batch-size 4 --eval-iters 1"),
        ("all", "--micro-batch-size 1 --full-validation"),
        ("all", "--micro-batch-size 1 --eval-iters 1 --eval-interval 1"),
    ):
        paths = f"--train-data-path {tmp_path}/one --valid-data-path {tmp_path}/{name}"
        run = run_loop(f"{paths} --sft --train-iters 3 --lr 1e-30 {more}", base=CORPUS)
        found.append(run.losses)
    *whole, one_by_one = found
    answered = [loss for loss in one_by_one if not math.isnan(loss)]
    assert (len(answered), len(one_by_one)) == (1, 4)
    losses = [*chain(*whole), *answered]
    assert_near(losses, [losses[0]] * 6, 1e-6, "the same answer")


VOCAB_SIZE, SEQ_LENGTH, NUM_SAMPLES = 60, 12, 24
COUNTS = np.arange(VOCAB_SIZE) % 7
EOD = VOCAB_SIZE - 1
MASKED = "--eod-mask-loss --reset-attention-mask --reset-position-ids"


def made_with(counts: NDArray[np.int64] | None, digest: str = "1") -> Fingerprint:
    return Fingerprint(
        tokenizer_type="HuggingFaceTokenizer",
        file="tokenizer.json",
        vocab_size=VOCAB_SIZE,
        digest=digest,
        token_bytes=None if counts is None else " ".join(map(str, counts)),
    )


@pytest.fixture
def scored(tmp_path: Path) -> str:
    """Training data, and held-out data of which some say how much text their tokens are."""
    tables = {
        "train": None,
        "own": made_with(COUNTS),
        "same": made_with(COUNTS),
        "other": made_with(COUNTS + 1, "2"),
        "older": made_with(None),
        "foreign": None,
    }
    random = np.random.RandomState(7)
    for name, tokenizer in tables.items():
        parts = ([*random.randint(0, EOD, random.randint(2, 30)), EOD] for _ in range(9))
        # As one sequence, so that samples are in its order.
        write_corpus(tmp_path / name, [[[*chain(*parts)]]], made_with=tokenizer)
    return f"--train-data-path {tmp_path}/train --train-iters 1 --skip-train"


def counted(folder: Path, *names: str, masked: bool) -> tuple[int, int]:
    """How many tokens samples of these corpora predict, and the bytes that these stand for."""
    pairs: list[tuple[int, int]] = []
    for name in names:
        ids = [*chain(*chain(*read_corpus(folder / name)))]
        pairs += [*pairwise(ids)][: (len(ids) - 1) // SEQ_LENGTH * SEQ_LENGTH]
    assert len(pairs) == NUM_SAMPLES * SEQ_LENGTH
    kept = [label for before, label in pairs if not (masked and before == EOD)]
    return len(kept), sum(int(COUNTS[label]) for label in kept)


@pytest.mark.slow("evaluates several times")
def test_bits_per_byte_are_the_loss_by_the_bytes_of_its_tokens(scored: str, tmp_path: Path) -> None:
    """In one micro-batch or many, which have different numbers of tokens under a mask."""
    sets = f"--valid-data-path {tmp_path}/own {tmp_path}/same"
    for more in ("", MASKED):
        whole = run_loop(
            f"{scored} {sets} {more} --micro-batch-size 4 --full-validation", base=CORPUS
        )
        tokens, text_bytes = counted(tmp_path, "own", "same", masked=bool(more))
        wanted = whole.losses[0] * tokens / math.log(2) / text_bytes
        assert_near(map(float, whole.bits), [wanted], 1e-6, "bits per byte")
        each = f"--micro-batch-size 1 --global-batch-size 1 --eval-iters {NUM_SAMPLES}"
        by_one = run_loop(f"{scored} {sets} {more} {each}", base=CORPUS)
        assert_near(map(float, by_one.bits), map(float, whole.bits), 1e-6, "bits by one")
        assert_near(by_one.losses, whole.losses, 1e-6, more)


@pytest.mark.slow("evaluates several times")
def test_bits_per_byte_need_corpora_that_all_say_the_same(
    scored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["own", "other", "older", "foreign"]
    sets = " ".join(f"{tmp_path}/{name}" for name in names)
    brief = f"{scored} --micro-batch-size 1 --eval-iters 1 --valid-data-path"
    bits = run_loop(f"{brief} {sets} --multiple-validation-sets", base=CORPUS).bits
    assert [value is not None for value in bits] == [True, True, False, False]
    assert capsys.readouterr().out.count("bits per byte: ") == 2
    for name, has in (("same", True), ("other", False), ("foreign", False)):
        (value,) = run_loop(f"{brief} 1 {tmp_path}/own 2 {tmp_path}/{name}", base=CORPUS).bits
        assert (value is not None) == has, name


def test_weights_and_full_validation_contradict_each_other(flags: str, tmp_path: Path) -> None:
    weighed = f"{flags} --valid-data-path 1 {tmp_path / 'prose'} 2 {tmp_path / 'code'}"
    words = f"{weighed} --micro-batch-size 1 --full-validation"
    refused(lambda: run_loop(words, base=CORPUS), "--valid-data-path ... --full-validation")
