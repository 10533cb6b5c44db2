"""Megatron's own data sets, from the megatron-core wheel: the samples they read, in order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

Blend = tuple[list[str], list[float] | None]


def megatron_datasets() -> SimpleNamespace:
    """The classes of megatron-core; importing takes seconds, and warns about missing packages.

    The wheel includes its compiled C++ helper.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import blended_megatron_dataset_builder as builder
        from megatron.core.datasets import gpt_dataset, indexed_dataset
    return SimpleNamespace(
        Builder=builder.BlendedMegatronDatasetBuilder,
        GPTDataset=gpt_dataset.GPTDataset,
        GPTDatasetConfig=gpt_dataset.GPTDatasetConfig,
        IndexedDataset=indexed_dataset.IndexedDataset,
        IndexedDatasetBuilder=indexed_dataset.IndexedDatasetBuilder,
        optimal_dtype=indexed_dataset.DType.optimal_dtype,
    )


class FixedTokenizer:
    """The tokenizer interface that megatron-core calls."""

    def __init__(self, eod: int) -> None:
        self.eod = eod
        self.vocab_size = eod + 1
        self.unique_identifiers = {"class": "FixedTokenizer", "eod": eod}


def megatron_splits(
    *,
    sizes: Sequence[int | None],
    seq_length: int,
    seed: int,
    eod: int = 0,
    masks: dict[str, bool] | None = None,
    **source: Any,
) -> list[Any]:
    """Train, valid and test as Megatron builds them, from `blend` and `split` or otherwise.

    A split of size 0 is not built, since Megatron fails on a split without tokens.
    """
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    megatron = megatron_datasets()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = megatron.GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            tokenizer=FixedTokenizer(eod),
            **{name: (masks or {}).get(name, False) for name in names},
            **source,
        )
        if config.split_matrix:
            config.split_matrix = [
                None if size == 0 else share
                for size, share in zip(sizes, config.split_matrix, strict=True)
            ]
        built: list[Any] = megatron.Builder(
            megatron.GPTDataset, list(sizes), lambda: True, config
        ).build()
    return built


def text_of(sample: dict[str, Any]) -> list[int]:
    """The seq_length + 1 ids of one of Megatron's samples."""
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


def random_corpus(
    random: np.random.RandomState, *, num_documents: int, longest: int, vocab: int
) -> list[list[list[int]]]:
    """Documents of one or two sequences, some of them empty and some of a single token."""
    documents = []
    for _ in range(num_documents):
        kind = random.randint(6)
        length = 0 if kind == 0 else 1 if kind == 1 else random.randint(1, longest + 1)
        ids = random.randint(0, vocab, size=length).tolist()
        cut = random.randint(length + 1) if random.randint(3) == 0 else length
        documents.append([part for part in (ids[:cut], ids[cut:]) if part])
    return documents
