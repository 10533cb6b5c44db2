"""Files, indices, samples and blends equal those of the megatron-core wheel."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import data.sample_order
from data.config import DataConfig
from data.gpt_dataset import SplitRequest, build_gpt_dataset
from data.indexed_dataset import IndexedDataset
from data.loader import SplitCounts, build_datasets
from data.sample_order import OrderPlan, build_order, split_bounds, split_matrix
from tests.helpers.corpora import corpus_bytes, write_corpus
from tests.helpers.refusals import refused
from tests.helpers.warm_process import HANGS_AFTER


def megatron_modules() -> tuple[Any, Any, Any]:
    """megatron-core's builder of blends, samples, and corpora; importing warns of other packages.

    The wheel includes its compiled C++ helper.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import blended_megatron_dataset_builder as builder
        from megatron.core.datasets import gpt_dataset, indexed_dataset
    return builder, gpt_dataset, indexed_dataset


# What megatron-core reads of a tokenizer.
TOKENIZER = SimpleNamespace(eod=0, vocab_size=1, unique_identifiers={"class": "fixed"})


def megatron_splits(
    *, sizes: Sequence[int | None], seq_length: int, seed: int, **source: Any
) -> list[Any]:
    """Train, valid and test as Megatron builds them, from `blend` and `split` or otherwise.

    A split of size 0 is not built, since Megatron fails on a split without tokens.
    """
    masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    builder, gpt_dataset, _ = megatron_modules()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            tokenizer=TOKENIZER,
            **dict.fromkeys(masks, False),
            **source,
        )
        if config.split_matrix:
            config.split_matrix = [
                None if size == 0 else share
                for size, share in zip(sizes, config.split_matrix, strict=True)
            ]
        make = builder.BlendedMegatronDatasetBuilder
        built: list[Any] = make(gpt_dataset.GPTDataset, [*sizes], lambda: True, config).build()
    return built


def text_of(sample: dict[str, Any]) -> list[int]:
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


NAMES = ("train", "valid", "test")
SPLITS = ("969, 30, 1", "1,0,0", "0.7,0.2,0.1", "33,33,34", "90,10", "2 1 1", "7,0,3")


def documents_of(seed: int) -> tuple[list[list[list[int]]], np.dtype[np.generic]]:
    """Documents of one or two sequences, some of them empty and some of a single token."""
    random = np.random.RandomState(seed)
    wide = seed % 2 == 1
    longest, documents = random.choice([3, 20, 90]), []
    for _ in range(random.randint(4, 60)):
        kind = random.randint(6)
        length = 0 if kind == 0 else 1 if kind == 1 else random.randint(1, longest + 1)
        ids = random.randint(0, 100_000 if wide else 60_000, size=length).tolist()
        cut = random.randint(length + 1) if random.randint(3) == 0 else length
        documents.append([part for part in (ids[:cut], ids[cut:]) if part])
    documents.append([random.randint(0, 60_000, size=30).tolist()])  # never without any token
    return documents, np.dtype("<i4" if wide else "<u2")


pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.slow("imports megatron-core"),
]


@pytest.mark.parametrize("seed", range(3))
def test_our_bytes_are_megatrons(tmp_path: Path, seed: int) -> None:
    documents, dtype = documents_of(seed)
    write_corpus(tmp_path / "ours", documents, dtype)
    *_, indexed = megatron_modules()
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    for sequences in documents:
        joined = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(joined), [len(sequence) for sequence in sequences])
    builder.finalize(str(tmp_path / "theirs.idx"))
    both = [corpus_bytes(tmp_path / name, "bin", "idx") for name in ("ours", "theirs")]
    assert both[0] == both[1]
    ours = IndexedDataset(tmp_path / "theirs")
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"), mmap=True)
    assert ours.dtype == theirs[0].dtype
    assert ours.document_indices().tolist() == theirs.document_indices.tolist()
    assert all(ours[i].tolist() == theirs[i].tolist() for i in range(len(ours)))
    assert len(ours) == len(theirs)
    assert ours[-1 % len(ours)].tolist() == documents[-1][-1]


def requested(random: np.random.RandomState, epochs_of: int, seq_length: int) -> int:
    """A random number of samples: part of an epoch, one or several, with or without a remainder."""
    per_epoch = (epochs_of - 1) // seq_length
    around = random.choice([0.3, 1.0, 1.5, 2.0, 2.85, 4.1]) * per_epoch
    return max(1, int(around) + random.randint(-1, 2))


@pytest.mark.parametrize("seed", range(12))
def test_indices_and_samples_are_megatrons(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.sample_order, "BLOCK", (1, 3, 1000)[seed % 3])
    random = np.random.RandomState(1000 + seed)
    ours = IndexedDataset(write_corpus(tmp_path / "corpus", *documents_of(seed)))
    split = SPLITS[seed % len(SPLITS)]
    seq_length = int(random.choice([1, 2, 5, 16]))
    sizes = []
    shares = list(split_matrix(split))
    for place, name in enumerate(NAMES):
        bounds = split_bounds(split, name, len(ours))
        tokens = int(ours.sequence_lengths()[bounds.start : bounds.stop].sum())
        if tokens <= seq_length:  # megatron-core loops forever, or has no data
            shares[place] = None
            sizes.append(0)
        else:
            sizes.append(requested(random, tokens, seq_length))
    given = {"seq_length": seq_length, "seed": seed + 7, "split": split}
    theirs = megatron_splits(sizes=sizes, blend=([str(tmp_path / "corpus")], None), **given)
    config = DataConfig(data_path=("corpus",), **given)
    compared = 0
    for name, share, size, their in zip(NAMES, shares, sizes, theirs, strict=True):
        if share is None:
            continue
        request = SplitRequest(config=config, split_name=name, num_samples=size, vocab_size=100_000)
        our = build_gpt_dataset(ours, request)
        assert size <= our.plan.total_samples == len(our)
        for part in ("document_index", "sample_index", "shuffle_index"):
            mine, other = getattr(our.order, part), getattr(their, part)
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other), part
        assert len(our) == len(their)
        assert all(our[i].text.tolist() == text_of(their[i]) for i in range(len(our)))
        compared += len(our)
    assert compared > 0


# Blends


def write_corpora(folder: Path, seed: int) -> tuple[list[str], list[float], tuple[str, ...]]:
    """Two to five corpora of different sizes: prefixes, weights, and both as words of a flag."""
    random = np.random.RandomState(seed)
    prefixes = []
    for number in range(2 + seed % 4):
        lengths = (max(0, random.randint(-3, 30)) for _ in range(random.randint(80, 140)))
        documents = ([random.randint(0, 500, size=length)] for length in lengths)
        prefixes.append(str(write_corpus(folder / f"corpus{number}", documents)))
    weights = [round(float(w), 3) for w in random.uniform(0.05, 5.0, size=len(prefixes))]
    pairs = zip(weights, prefixes, strict=True)
    return prefixes, weights, tuple(word for weight, path in pairs for word in (str(weight), path))


def compare(sizes: Sequence[int | None], ours: dict[str, Any], **theirs: Any) -> None:
    config = DataConfig(seq_length=8, seed=31, **ours)
    counts = dict(zip(NAMES, sizes, strict=True))
    found = build_datasets(config, SplitCounts(**counts), 500, None)
    built = megatron_splits(sizes=sizes, seq_length=8, seed=31, **theirs)
    compared = 0
    for name, their in zip(NAMES, built, strict=True):
        if their is None:
            continue
        mine = found.valid[""] if name == "valid" else getattr(found, name)
        count = counts[name]
        if hasattr(their, "dataset_index"):
            for part in ("dataset_index", "dataset_sample_index"):
                assert getattr(mine.indices, part).dtype == getattr(their, part).dtype
                assert np.array_equal(getattr(mine.indices, part), getattr(their, part))
        assert len(their) >= (len(mine) if count is None else count)
        for i in range(len(their)):
            assert mine[i].text.tolist() == text_of(their[i])
        compared += len(their)
    assert compared > 0


PARTS, TRAIN = "70,20,10", "1,0,0"


@pytest.mark.parametrize("seed", range(3))
def test_blends(tmp_path: Path, seed: int) -> None:
    prefixes, weights, words = write_corpora(tmp_path, seed)
    first, every = prefixes[0], tuple(prefixes)
    sizes = (int(np.random.RandomState(seed).randint(20, 900)), 15, 7)
    ours = {"data_path": words, "split": PARTS}
    compare(sizes, ours, blend=(prefixes, weights), split=PARTS)
    # Sizes decide where there are no weights.
    compare((60, 20, 0), {"data_path": every, "split": PARTS}, blend=(prefixes, None), split=PARTS)
    # One corpus with a weight: Megatron builds 0.5% more samples, so the last epoch may differ.
    one = {"data_path": ("1", first), "split": TRAIN}
    compare((300, 0, 0), one, blend=([first], [1.0]), split=TRAIN)
    own = {"train_data_path": words, "valid_data_path": ("1", first), "test_data_path": (first,)}
    alone = ([first], None)
    compare((50, 9, 4), own, blend_per_split=[(prefixes, weights), alone, alone])
    full = {"train_data_path": every, "valid_data_path": every, "full_validation": True}
    compare((1, None, 0), full, blend_per_split=[None, (prefixes, None), None])


DOCUMENTS, TOKENS, SEQ = 3_000_000, 2_000_000_000, 4096
GIB = 2**30


def sizes() -> NDArray[np.int32]:
    random = np.random.RandomState(5)
    lengths = random.exponential(TOKENS / DOCUMENTS, size=DOCUMENTS).astype(np.int32)
    lengths[-1] += TOKENS - int(lengths.sum(dtype=np.int64))
    return lengths


def plan_of(num_samples: int) -> OrderPlan:
    given = {"tokens_per_epoch": TOKENS, "seq_length": SEQ, "seed": 1}
    return OrderPlan(bounds=range(DOCUMENTS), num_samples=num_samples, **given)


def test_an_order_has_bounds() -> None:
    refused(lambda: plan_of(10**10), "10000000000 samples are ... --train-iters")


def peak_of_building(results: object) -> None:
    lengths = sizes()
    build_order(lengths, plan_of(TOKENS // SEQ - 1))
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # type: ignore[attr-defined]


@pytest.mark.verify
def test_memory() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=peak_of_building, args=(results,))
    process.start()
    peak = results.get(timeout=HANGS_AFTER)
    process.join()
    assert 0 < peak < 4 * GIB
