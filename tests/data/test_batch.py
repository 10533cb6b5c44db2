"""Masks, positions and documents of a sample equal Megatron's; synthetic tokens can be learnt."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data.batch import RESTART_PROBABILITY, Fetch, MockDataset
from data.config import DocumentRules
from tests.data.test_loader import Numbered

EOD = 9


class One(Numbered):
    """Make one sample of the given tokens, and a last label."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(1)
        self.tokens = tokens

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return np.array([*self.tokens, 0])


def megatron_masks(tokens: list[int], rules: DocumentRules) -> tuple[torch.Tensor, ...]:
    """Attention mask (True: hidden), loss mask and positions of one sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
    masks: tuple[torch.Tensor, ...] = _get_ltor_masks_and_position_ids(
        torch.tensor(tokens),
        EOD,
        rules.reset_position_ids,
        rules.reset_attention_mask,
        rules.eod_mask_loss,
        True,
    )
    return masks


def hidden_by(lengths: tuple[int, ...]) -> torch.Tensor:
    """The attention mask (True: hidden) for documents of these lengths in sequence."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    apart = documents[:, None] != documents[None, :]
    return apart | torch.ones(apart.shape, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("flags", list(product([False, True], repeat=3)))
@settings(deadline=None)  # the first call imports megatron-core
@given(tokens=st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=12))
def test_one_sample(flags: tuple[bool, bool, bool], tokens: list[int]) -> None:
    rules = DocumentRules(
        eod_mask_loss=flags[0], reset_position_ids=flags[1], reset_attention_mask=flags[2]
    )
    hidden, loss_mask, positions = megatron_masks(tokens, rules)
    mine = Fetch(One(tokens), rules, EOD)[range(1)]
    assert mine.loss_mask_BS[0].tolist() == loss_mask.tolist()
    if rules.reset_position_ids:
        assert mine.positions_BS[0].tolist() == positions.tolist()
    else:
        assert mine.positions_BS is None
    if rules.reset_attention_mask:
        assert sum(mine.document_lengths) == len(tokens)
        assert torch.equal(hidden_by(mine.document_lengths), hidden[0])
    else:
        assert mine.document_lengths is None


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
