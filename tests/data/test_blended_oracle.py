"""Blends of two to five corpora equal those of the megatron-core wheel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.loader import Datasets, SplitCounts, build_datasets
from tests.data.megatron import megatron_datasets, megatron_splits, text_of
from tests.helpers.corpora import write_corpus

VOCAB = 500
SEQ = 8


@dataclass(frozen=True)
class Corpora:
    prefixes: list[str]
    weights: list[float]

    def words(self) -> tuple[str, ...]:
        pairs = zip(self.weights, self.prefixes, strict=True)
        return tuple(word for weight, prefix in pairs for word in (str(weight), prefix))


def write_corpora(folder: Path, seed: int) -> Corpora:
    """Two to five corpora of different sizes, with weights."""
    random = np.random.RandomState(seed)
    prefixes = []
    for number in range(2 + seed % 4):
        lengths = (max(0, random.randint(-3, 30)) for _ in range(random.randint(80, 140)))
        documents = ([random.randint(0, VOCAB, size=length)] for length in lengths)
        prefixes.append(str(write_corpus(folder / f"corpus{number}", documents)))
    weights = [round(float(w), 3) for w in random.uniform(0.05, 5.0, size=len(prefixes))]
    return Corpora(prefixes, weights)


def ours(counts: Sequence[int | None], **source: object) -> Datasets:
    config = DataConfig(seq_length=SEQ, seed=31, **source)  # type: ignore[arg-type]
    train, valid, test = counts
    return build_datasets(config, SplitCounts(train=train, valid=valid, test=test), VOCAB)


def megatrons(sizes: Sequence[int | None], **source: object) -> list[Any]:
    return megatron_splits(sizes=sizes, seq_length=SEQ, seed=31, **source)


def assert_equal(mine: object, theirs: object, *, num_samples: int) -> None:
    for part in ("dataset_index", "dataset_sample_index"):
        assert getattr(mine.indices, part).dtype == getattr(theirs, part).dtype
        assert np.array_equal(getattr(mine.indices, part), getattr(theirs, part))
    assert len(theirs) >= num_samples  # type: ignore[arg-type]
    for i in range(len(theirs)):  # type: ignore[arg-type]
        assert mine[i].tolist() == text_of(theirs[i])  # type: ignore[index]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """megatron-core is there, whose import takes seconds."""
    megatron_datasets()


@pytest.mark.parametrize("seed", range(8))
def test_weights(tmp_path: Path, seed: int) -> None:
    corpora = write_corpora(tmp_path, seed)
    counts = (int(np.random.RandomState(seed).randint(20, 900)), 15, 7)
    mine = ours(counts, data_path=corpora.words(), split="70,20,10")
    blend = (corpora.prefixes, corpora.weights)
    theirs = megatrons(counts, blend=blend, split="70,20,10")
    for name, count, their in zip(("train", "valid", "test"), counts, theirs, strict=True):
        assert_equal(getattr(mine, name), their, num_samples=count)


@pytest.mark.parametrize("seed", range(4))
def test_sizes_decide_where_there_are_no_weights(tmp_path: Path, seed: int) -> None:
    corpora = write_corpora(tmp_path, seed)
    mine = ours((60, 20, 0), data_path=tuple(corpora.prefixes), split="70,30,0")
    theirs = megatrons((60, 20, 0), blend=(corpora.prefixes, None), split="70,30,0")
    assert_equal(mine.train, theirs[0], num_samples=60)
    assert_equal(mine.valid, theirs[1], num_samples=20)


@pytest.mark.parametrize("seed", range(4))
def test_every_split_from_corpora_of_its_own(tmp_path: Path, seed: int) -> None:
    corpora = write_corpora(tmp_path, seed)
    single = corpora.prefixes[0]
    mine = ours(
        (50, 9, 4),
        train_data_path=corpora.words(),
        valid_data_path=("1", single),
        test_data_path=(single,),
    )
    one = ([single], None)
    own = [(corpora.prefixes, corpora.weights), one, one]
    theirs = megatrons((50, 9, 4), blend_per_split=own)
    assert_equal(mine.train, theirs[0], num_samples=50)
    for samples, their in ((mine.valid, theirs[1]), (mine.test, theirs[2])):
        assert [samples[i].tolist() for i in range(len(their))] == [
            text_of(their[i]) for i in range(len(their))
        ]


def test_one_corpus_with_a_weight_is_a_blend(tmp_path: Path) -> None:
    """Megatron builds 0.5% more samples, so its last epoch may be shuffled differently."""
    prefix = write_corpora(tmp_path, 0).prefixes[0]
    mine = ours((300, 0, 0), data_path=("1", prefix), split="1,0,0")
    theirs = megatrons((300, 0, 0), blend=([prefix], [1.0]), split="1,0,0")
    assert_equal(mine.train, theirs[0], num_samples=300)


@pytest.mark.parametrize("seed", range(4))
def test_every_sample_once(tmp_path: Path, seed: int) -> None:
    corpora = write_corpora(tmp_path, seed)
    prefixes = tuple(corpora.prefixes)
    own = {"train_data_path": prefixes, "valid_data_path": prefixes, "full_validation": True}
    mine = ours((1, None, 0), **own).valid
    theirs = megatrons((0, None, 0), blend_per_split=[None, (corpora.prefixes, None), None])
    assert_equal(mine, theirs[1], num_samples=len(mine))
