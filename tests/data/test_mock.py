"""Synthetic tokens: reproducible, independent, and predictable to a known degree."""

from __future__ import annotations

import numpy as np
import pytest

from data.batch import RESTART_PROBABILITY, MockDataset

VOCAB = 64


def mock(*, seed: int = 1, stream: int = 0, num_samples: int = 400) -> MockDataset:
    return MockDataset(
        num_samples=num_samples, seq_length=32, vocab_size=VOCAB, seed=seed, stream=stream
    )


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    assert mock()[7].tolist() == mock(num_samples=8)[7].tolist()
    assert mock()[7].tolist() != mock()[8].tolist()
    assert mock()[7].tolist() != mock(seed=2)[7].tolist()
    assert mock()[7].tolist() != mock(stream=1)[7].tolist()


def test_samples_have_one_token_more_and_lie_in_the_vocabulary() -> None:
    tokens = np.stack([mock()[i] for i in range(400)])
    assert tokens.shape == (400, 33)
    assert tokens.dtype == np.int64
    assert set(np.unique(tokens)) == set(range(VOCAB))
    assert len(mock(num_samples=3)) == 3


def test_the_next_token_is_predictable_from_the_last_across_streams() -> None:
    counts = np.zeros((VOCAB, VOCAB))
    for i in range(400):
        sample = mock(stream=0)[i]
        np.add.at(counts, (sample[:-1], sample[1:]), 1)
    successor = counts.argmax(axis=1)
    held_out = np.stack([mock(stream=1)[i] for i in range(400)])
    right = (successor[held_out[:, :-1]] == held_out[:, 1:]).mean()
    assert right == pytest.approx(1 - RESTART_PROBABILITY, abs=0.02)


def test_frequencies_alone_tell_something() -> None:
    tokens = np.concatenate([mock()[i] for i in range(400)])
    part = np.bincount(tokens, minlength=VOCAB) / len(tokens)
    entropy = -(part * np.log(part)).sum()
    assert entropy < np.log(VOCAB) - 0.1
