"""Files, indices and samples equal those of the megatron-core wheel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import data.sample_order
from data.config import DataConfig
from data.gpt_dataset import SplitRequest, build_gpt_dataset
from data.indexed_dataset import IndexedDataset
from data.sample_order import split_bounds, split_matrix
from tests.data.megatron import (
    megatron_datasets,
    megatron_splits,
    random_corpus,
    text_of,
)
from tests.helpers.corpora import corpus_bytes, write_corpus

SPLITS = ("969, 30, 1", "1,0,0", "0.7,0.2,0.1", "33,33,34", "90,10", "2 1 1", "7,0,3")


def documents_of(seed: int) -> tuple[list[list[list[int]]], np.dtype[np.generic]]:
    random = np.random.RandomState(seed)
    wide = seed % 2 == 1
    documents = random_corpus(
        random,
        num_documents=random.randint(4, 60),
        longest=random.choice([3, 20, 90]),
        vocab=100_000 if wide else 60_000,
    )
    documents.append([random.randint(0, 60_000, size=30).tolist()])  # never without any token
    return documents, np.dtype("<i4" if wide else "<u2")


def write_ours(prefix: Path, seed: int) -> IndexedDataset:
    return IndexedDataset(write_corpus(prefix, *documents_of(seed)))


pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """megatron-core is there, whose import takes seconds."""
    megatron_datasets()


@pytest.mark.parametrize("seed", range(8))
def test_our_bytes_are_megatrons(tmp_path: Path, seed: int) -> None:
    documents, dtype = documents_of(seed)
    write_ours(tmp_path / "ours", seed)
    builder = megatron_datasets().IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type
    )
    for sequences in documents:
        joined = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(joined), [len(sequence) for sequence in sequences])
    builder.finalize(str(tmp_path / "theirs.idx"))
    both = [corpus_bytes(tmp_path / name, "bin", "idx") for name in ("ours", "theirs")]
    assert both[0] == both[1]
    ours = IndexedDataset(tmp_path / "theirs")
    theirs = megatron_datasets().IndexedDataset(str(tmp_path / "ours"), mmap=True)
    assert ours.dtype == theirs[0].dtype
    assert ours.document_indices().tolist() == theirs.document_indices.tolist()
    assert [ours[i].tolist() for i in range(len(ours))] == [
        theirs[i].tolist() for i in range(len(theirs))
    ]
    assert ours[-1 % len(ours)].tolist() == documents[-1][-1]


def requested(random: np.random.RandomState, epochs_of: int, seq_length: int) -> int:
    """A random number of samples: part of an epoch, one or several, with or without a remainder."""
    per_epoch = (epochs_of - 1) // seq_length
    around = random.choice([0.3, 1.0, 1.5, 2.0, 2.85, 4.1]) * per_epoch
    return max(1, int(around) + random.randint(-1, 2))


@pytest.mark.parametrize("seed", range(40))
def test_indices_and_samples_are_megatrons(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.sample_order, "BLOCK", (1, 3, 1000)[seed % 3])
    random = np.random.RandomState(1000 + seed)
    ours = write_ours(tmp_path / "corpus", seed)
    split = SPLITS[seed % len(SPLITS)]
    seq_length = int(random.choice([1, 2, 5, 16]))
    sizes = []
    shares = list(split_matrix(split))
    for place, share in enumerate(shares):
        first, last = split_bounds(share, len(ours)) if share else (0, 0)
        tokens = int(ours.sequence_lengths()[first:last].sum())
        if tokens <= seq_length:  # megatron-core loops forever, or has no data
            shares[place] = None
            sizes.append(0)
        else:
            sizes.append(requested(random, tokens, seq_length))
    theirs = megatron_splits(
        sizes=sizes,
        seq_length=seq_length,
        seed=seed + 7,
        blend=([str(tmp_path / "corpus")], None),
        split=split,
    )
    config = DataConfig(data_path=("corpus",), split=split, seq_length=seq_length, seed=seed + 7)
    compared = 0
    for name, share, size, their in zip(
        ("train", "valid", "test"), shares, sizes, theirs, strict=True
    ):
        if share is None:
            continue
        request = SplitRequest(config=config, split_name=name, num_samples=size, vocab_size=100_000)
        our = build_gpt_dataset(ours, request)
        assert size <= our.plan.total_samples == len(our)
        for part in ("document_index", "sample_index", "shuffle_index"):
            mine, other = getattr(our.order, part), getattr(their, part)
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other), part
        assert [our[i].tolist() for i in range(len(our))] == [
            text_of(their[i]) for i in range(len(their))
        ]
        compared += len(our)
    assert compared > 0
