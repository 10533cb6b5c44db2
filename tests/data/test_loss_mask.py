"""Masks, positions, documents of a sample: conversations', Megatron's; synthetic tokens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import BatchFetcher, MockDataset, Sample
from data.config import DataConfig, DocumentRules
from data.gpt_dataset import check_answers
from data.loader import Datasets, MicroBatches
from tests.data.test_indexed_dataset import flip
from tests.data.test_loader import batches_of
from tests.data.test_loader import built as of_words
from tests.helpers.corpora import write_conversations, write_corpus
from tests.helpers.refusals import refused
from tools.merge_datasets import main as merge

SEQ = 8
EOD = 7  # occurs inside conversations, as ends of turns do
APART = {"reset_position_ids": True, "reset_attention_mask": True}
Conversation = tuple[list[int], list[int]]


def drawn(seed: int, number: int = 40) -> list[Conversation]:
    """Of 2 to 12 tokens, each with an id of its own per conversation, besides EOD."""
    random = np.random.default_rng(seed)
    found = []
    for place in range(number):
        size = int(random.integers(2, 13))
        ids = np.where(random.random(size) < 0.2, EOD, 10 + place)
        found.append((ids.tolist(), random.integers(0, 2, size).tolist()))
    return found


def built(*words: str, **fields: Any) -> Datasets:
    return of_words(*words, **{"counts": (40,), "split": "1,0,0", **fields})


def batches(datasets: Datasets, config: dict[str, bool], **fields: object) -> MicroBatches:
    rules = DataConfig(seq_length=SEQ, data_path=("x",), **config)  # type: ignore[arg-type]
    return batches_of(datasets.train, rules=rules, eod=EOD, **fields)


def test_a_packed_sample_weighs_answers_and_keeps_conversations_apart(tmp_path: Path) -> None:
    talks = drawn(0)
    prefix = str(write_conversations(tmp_path / "x", talks))
    datasets = built(prefix, **APART)
    order = datasets.corpora()["train"][0].order
    row = [(n, place) for n in order.document_index for place in range(len(talks[n][0]))]
    source = batches(datasets, APART)
    for i in range(40):
        begin = int(order.shuffle_index[i]) * SEQ
        inside = row[begin : begin + SEQ + 1]
        batch = next(source)
        assert batch.tokens_BS[0].tolist() == [talks[n][0][place] for n, place in inside[:-1]]
        # The first token of a conversation is no answer to the one before.
        wanted = [float(talks[n][1][place]) if place else 0.0 for n, place in inside[1:]]
        assert batch.loss_mask_BS[0].tolist() == wanted
        assert batch.mask_sum == sum(wanted)
        begins = [0, *(at for at, (_, place) in enumerate(inside[:-1]) if at and place == 0)]
        lengths = np.diff([*begins, SEQ]).tolist()
        assert batch.document_lengths == tuple(lengths)
        assert batch.positions_BS[0].tolist() == [at for size in lengths for at in range(size)]


@pytest.mark.parametrize("weighted", [False, True])
def test_with_sft_a_sample_is_one_conversation(tmp_path: Path, weighted: bool) -> None:
    talks = drawn(1)
    prefix = str(write_conversations(tmp_path / "x", talks))
    datasets = built(*(("1", prefix) if weighted else (prefix,)), counts=(80,), sft=True)
    source = batches(datasets, {"sft": True})
    seen = []
    for _ in range(80):
        batch = next(source)
        ids = batch.tokens_BS[0].tolist()
        own = [talk for talk in talks if talk[0][:SEQ] == ids[: len(talk[0])]]
        assert own, ids
        size = min(SEQ, len(own[0][0]))
        assert batch.labels_BS[0, : size - 1].tolist() == ids[1:size]
        masks = [[*talk[1][1:size], *[0] * (SEQ + 1 - size)] for talk in own]
        assert batch.loss_mask_BS[0].tolist() in masks
        assert ids[size:] == [ids[size - 1]] * (SEQ - size)
        assert batch.document_lengths is None
        seen.append(max(ids) - 10)
    assert sorted(seen) == sorted([*range(40)] * 2)
    cut = sum(len(ids) > SEQ for ids, _ in talks)
    assert weighted or f"40 conversations, {cut} of them cut" in datasets.describe()[0]


def test_every_conversation_is_read_once_in_a_full_validation(tmp_path: Path) -> None:
    talks = drawn(2)
    prefix = str(write_conversations(tmp_path / "x", talks))
    paths = {"train_data_path": (prefix,), "valid_data_path": (prefix,)}
    valid = of_words(**paths, counts=(1, None), full_validation=True, sft=True).valid
    assert len(valid[""]) == 40
    found = sorted(valid[""][i].text.tolist() for i in range(40))
    assert found == sorted((ids[:SEQ] + ids[:SEQ][-1:] * SEQ)[: SEQ + 1] for ids, _ in talks)


def test_plain_text_beside_conversations_is_weighed_whole(tmp_path: Path) -> None:
    talks = write_conversations(tmp_path / "talks", drawn(3))
    plain = write_corpus(tmp_path / "plain", [[[101, 102, EOD]]] * 100)
    datasets = built("1", str(talks), "1", str(plain), **APART)
    kinds = set()
    for batch in (next(source) for source in [batches(datasets, APART)] for _ in range(40)):
        is_plain = bool((batch.tokens_BS > 100).any())
        assert not is_plain or batch.mask_sum == SEQ
        assert not is_plain or max(batch.document_lengths or ()) == 3
        kinds.add(is_plain)
    assert kinds == {False, True}


def test_a_sample_without_an_answer_weighs_nothing(tmp_path: Path) -> None:
    prefix = str(write_conversations(tmp_path / "x", [([1, 2, 3], [0, 0, 0])] * 9))
    batch = next(batches(built(prefix, sft=True, counts=(9,)), {"sft": True}))
    assert batch.mask_sum == 0.0
    ranges = (range(2), range(6, 8))
    prefix = str(write_conversations(tmp_path / "y", [([1, 2, 3, 4], [0, 1, 0, 1])] * 9))
    batch = next(batches(built(prefix, sft=True, counts=(9,)), {"sft": True}, ranges=ranges))
    assert batch.loss_mask_BS.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert batch.mask_sum == 2.0, "of the whole sample"


def test_data_without_an_answered_token_are_refused(tmp_path: Path) -> None:
    """An answer that begins a sample, or comes after it, is no label of it."""
    none, first = [0] * 20, [1] + [0] * 19
    behind, answered = [0] * SEQ + [1] * (20 - SEQ), [0] * (SEQ - 1) + [1] + [0] * (20 - SEQ)
    talks = {"none": [none] * 4, "first": [first] * 4, "behind": [behind] * 4}
    paths = {
        name: str(write_conversations(tmp_path / name, [([*range(20)], marks) for marks in of_all]))
        for name, of_all in (talks | {"last": [none] * 3 + [answered]}).items()
    }
    last = paths.pop("last")
    sets = {"train_data_path": (last,), "valid_data_path": (last, paths["none"])}
    held_out = partial(of_words, **sets, counts=(1, 4), sft=True)
    for right in (
        built(last, sft=True),
        built("1", paths["none"], "1", last, sft=True),
        built(paths["behind"], **APART),
        held_out(),
    ):
        check_answers(right.corpora())
    wrong = {prefix: built(prefix, sft=True) for prefix in paths.values()}
    packed = {paths["first"]: built(paths["first"], **APART)}
    for prefix, datasets in (*wrong.items(), *packed.items()):
        message = f"train ... --seq-length {SEQ} ... {prefix}"
        refused(partial(check_answers, datasets.corpora()), message)
    apart = held_out(multiple_validation_sets=True).corpora()
    refused(partial(check_answers, apart), f"valid, none ... {paths['none']}")


def swap(one: Path, other: Path) -> None:
    for suffix in (".answered", ".answered.crc"):
        Path(f"{one}{suffix}").write_bytes(Path(f"{other}{suffix}").read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap, "x.answered does not belong to"),
        (lambda one, _: flip(Path(f"{one}.answered"), 3), "x.answered is damaged in bytes 0 to"),
        (lambda one, _: os.truncate(f"{one}.answered", 9), "x.answered.crc ... x.answered"),
        (lambda one, _: Path(f"{one}.answered.crc").unlink(), "x.answered.crc"),
    ],
)
def test_marks_that_are_not_those_of_the_corpus_are_refused(
    tmp_path: Path, damage: Callable[[Path, Path], None], message: str
) -> None:
    talks = drawn(4)
    one = write_conversations(tmp_path / "x", talks)
    other = [([token + 1 for token in ids], marks) for ids, marks in talks]
    damage(one, write_conversations(tmp_path / "y", other))
    refused(lambda: next(batches(built(str(one), sft=True), {"sft": True})), message)


def test_a_corpus_written_again_without_conversations_has_no_marks(tmp_path: Path) -> None:
    prefix = write_conversations(tmp_path / "x", drawn(5))
    write_corpus(prefix, [[range(100)]])
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "x.bin.crc", "x.idx"}


def test_flags_that_would_mix_conversations_are_refused(tmp_path: Path) -> None:
    talks = str(write_conversations(tmp_path / "talks", drawn(6)))
    plain = str(write_corpus(tmp_path / "plain", [[range(100)]]))
    for fields in ({}, {"reset_position_ids": True}, {"reset_attention_mask": True}):
        message = "--sft ... --reset-position-ids ... --reset-attention-mask"
        refused(partial(built, talks, **fields), talks, message)
    refused(partial(built, plain, sft=True), "--sft", f"{plain}.answered is missing")


def test_corpora_of_conversations_are_joined_and_not_with_others(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    first, second = drawn(7), drawn(8)
    write_conversations(folder / "a", first)
    write_conversations(folder / "b", second)
    words = ["--input", str(folder), "--output-prefix", str(tmp_path / "all")]
    merge(words)
    write_conversations(tmp_path / "once", first + second)
    for suffix in (".bin", ".answered", ".answered.crc"):
        found, wanted = (Path(f"{tmp_path}/{name}{suffix}") for name in ("all", "once"))
        assert found.read_bytes() == wanted.read_bytes()
    write_corpus(folder / "c", [[[1]]])
    refused(lambda: merge(words), f"{folder / 'c'} ... conversations")


END = 9


def megatron_masks(tokens: list[int], rules: DocumentRules) -> tuple[torch.Tensor, ...]:
    """Attention mask (True: hidden), loss mask and positions of one sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
    flags = (rules.reset_position_ids, rules.reset_attention_mask, rules.eod_mask_loss)
    masks: Any = _get_ltor_masks_and_position_ids(torch.tensor(tokens), END, *flags, True)
    return masks


def hidden_by(lengths: tuple[int, ...]) -> torch.Tensor:
    """The attention mask (True: hidden) for documents of these lengths in sequence."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    apart = documents[:, None] != documents[None, :]
    return apart | torch.ones(apart.shape, dtype=torch.bool).triu(1)


@pytest.mark.slow("imports megatron-core")
@pytest.mark.parametrize("flags", list(product([False, True], repeat=3)))
@settings(deadline=None)  # the first call imports megatron-core
@given(tokens=st.lists(st.sampled_from([1, 2, END]), min_size=1, max_size=12))
def test_one_sample(flags: tuple[bool, bool, bool], tokens: list[int]) -> None:
    rules = DocumentRules(
        eod_mask_loss=flags[0], reset_position_ids=flags[1], reset_attention_mask=flags[2]
    )
    hidden, loss_mask, positions = megatron_masks(tokens, rules)
    mine = BatchFetcher([Sample(np.array([*tokens, 0]))], rules, END)[range(1)]
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


def test_a_mock_sample_depends_on_seed_and_number_alone() -> None:
    assert mock()[7].text.tolist() == mock(num_samples=8)[7].text.tolist()
    assert mock()[7].text.tolist() != mock()[8].text.tolist()
    assert mock()[7].text.tolist() != mock(seed=2)[7].text.tolist()
    assert mock()[7].text.tolist() != mock(stream=1)[7].text.tolist()
    tokens = np.stack([sample.text for sample in map(mock().__getitem__, range(400))])
    assert (tokens.shape, tokens.dtype, len(mock(num_samples=3))) == ((400, 33), np.int64, 3)
    assert set(np.unique(tokens)) == set(range(VOCAB))
