"""Data set of one split of one corpus: its samples in Megatron's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data.batch import Sample
from data.config import DataConfig
from data.fingerprint import check_tokenizer
from data.index_cache import CacheEntry, cached
from data.indexed_dataset import IndexedDataset, Tokens, bin_path
from data.loss_mask import BEGINS, TRAINED, loss_mask_path
from data.sample_order import OrderPlan, SampleOrder, build_order, split_bounds, split_matrix
from data.tokenizer_config import TokenizerConfig
from paro.errors import UserError
from paro.files.checksum import crc32
from paro.text import listed

# Token ids are checked against the vocabulary when a corpus is opened: all ids of a corpus of up to
# this many bytes, which takes a tenth of a second, and evenly spaced blocks of larger corpora.
# Every sample is checked again when it is read.
SCAN_BYTES = 256 * 2**20
SCAN_BLOCKS = 64
PURPOSES = {"train": "training", "valid": "validation", "test": "test"}
NAMED = 3  # at most so many corpora are named in a line


class TooFewTokensError(UserError):
    """A split of a corpus has fewer tokens than one sample needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """The split and the number of samples to build, and how to open the corpora of the split."""

    config: DataConfig
    split_name: str
    num_samples: int | None  # samples to build at least; None: every sample once
    vocab_size: int
    open_corpus: Callable[[str], IndexedDataset] = IndexedDataset
    flag: str = "--data-path"  # the flag that names the corpora, for messages

    def build(self, prefix: str, num_samples: int | None) -> GPTDataset:
        """Build the split of one corpus with `num_samples` samples."""
        return build_gpt_dataset(self.open_corpus(prefix), replace(self, num_samples=num_samples))

    def total_samples(self, prefix: str, num_samples: int | None) -> int:
        request = replace(self, num_samples=num_samples)
        return plan_split(self.open_corpus(prefix), request).total_samples


@dataclass(eq=False)
class GPTDataset:
    """A split: sample i is the i-th sample to train on, an array of seq_length + 1 token ids.

    With --sft a conversation is cut after seq_length tokens, or padded with masked copies of the
    last token.
    """

    indexed: IndexedDataset
    plan: OrderPlan
    order: SampleOrder
    _: KW_ONLY
    vocab_size: int
    source: str = "indices kept in memory"

    def __len__(self) -> int:
        return self.plan.total_samples

    def __getitem__(self, index: int) -> Sample:
        places = [*self._places(index)]
        text = np.concatenate([self.indexed.get(*place) for place in places])
        _check_ids(text, self.vocab_size, self.indexed.prefix)
        text = self._filled(text.astype(np.int64), "edge")
        if self.indexed.loss_mask_file is None:
            return Sample(text)
        parts = []
        for sequence, begin, length in places:
            parts.append(self.indexed.marks(sequence, begin, length).copy())
            if begin == 0:  # the conversation begins with this token
                parts[-1][:1] = BEGINS
        # Pads with MASKED, which is 0.
        return Sample(text, self._filled(np.concatenate(parts), "constant"))

    def _places(self, index: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (sequence, offset, number of tokens) for each sequence that the sample reads."""
        sample = int(self.order.shuffle_index[index])
        bounds = self.order.sample_index[sample : sample + 2].tolist()
        (first, offset), (last, last_offset) = bounds
        last_offset += self.plan.shared_tokens
        sequences = self.order.document_index[first : last + 1].tolist()
        for entry, sequence in enumerate(sequences, first):
            begin = offset if entry == first else 0
            length = last_offset - begin if entry == last else None
            if length != 0:
                yield sequence, begin, length

    def _filled(self, row: NDArray[Any], mode: Literal["edge", "constant"]) -> NDArray[Any]:
        """Return a sample's entries; with --sft cut to seq_length, padded to seq_length + 1."""
        length = self.plan.seq_length
        if self.plan.shared_tokens == 0:
            row = row[:length]
            row = np.pad(row, (0, length + 1 - len(row)), mode)
        assert len(row) == length + 1, f"a sample has {len(row)} tokens"
        return row

    def describe(self) -> str:
        """Describe in one line the amount of data, the epochs, and the place of the order."""
        plan = self.plan
        wanted = plan.total_samples if plan.num_samples is None else plan.num_samples
        epochs = (wanted * plan.seq_length + plan.shared_tokens) / plan.tokens_per_epoch
        count = len(plan.bounds)
        content = f"{plan.tokens_per_epoch:,} tokens in {count:,} sequences"
        if plan.shared_tokens == 0:
            lengths = self.indexed.sequence_lengths()[plan.bounds.start : plan.bounds.stop]
            num_cut = int((lengths > plan.seq_length).sum())
            content = f"{count:,} conversations, {num_cut:,} of them cut to --seq-length"
        content += f" of {self.indexed.prefix}"
        return f"{wanted:,} samples, {epochs:.2f} epochs of {content}; {self.source}"


def open_checked(
    config: DataConfig, prefix: str, vocab_size: int, tokenizer: TokenizerConfig | None
) -> IndexedDataset:
    """Return a corpus; `UserError` unless the run can read it."""
    corpus = IndexedDataset(prefix)
    check_tokenizer(prefix, corpus.made_with, tokenizer)
    for ids in scanned(corpus):
        _check_ids(ids, vocab_size, prefix)
    has_loss_mask = corpus.loss_mask_file is not None
    if config.sft and not has_loss_mask:
        raise UserError(
            f"--sft: {prefix} has no conversations ({loss_mask_path(prefix)} is missing): write it "
            "with tools/preprocess_data.py --apply-chat-template, or leave --sft out"
        )
    # Samples must not mix conversations.
    apart = config.sft or (config.reset_position_ids and config.reset_attention_mask)
    if has_loss_mask and not apart:
        raise UserError(
            f"{prefix} has conversations, which must not see each other: give --sft for one a "
            "sample, or --reset-position-ids and --reset-attention-mask for as many as fit"
        )
    return corpus


def scanned(indexed: IndexedDataset) -> Iterator[Tokens]:
    """Yield all ids of a small corpus, evenly spaced blocks of a large one."""
    block = max(1, SCAN_BYTES // SCAN_BLOCKS // indexed.dtype.itemsize)
    count = indexed.num_tokens
    num_blocks = min(SCAN_BLOCKS, -(-count // block))
    for begin in np.linspace(0, max(0, count - block), num_blocks, dtype=np.int64).tolist():
        yield indexed.read(begin, min(block, count - begin))


def _check_ids(ids: Tokens, vocab_size: int, prefix: str) -> None:
    extremes = (int(ids.min(initial=0)), int(ids.max(initial=0)))
    wrong = [token for token in extremes if not 0 <= token < vocab_size]
    if wrong:
        older = (
            f"; if NullTokenizer made it before it counted the end of documents, give --vocab-size "
            f"{vocab_size + 1}"
        )
        raise UserError(
            f"{bin_path(prefix)} holds token id {wrong[0]}, the vocabulary has {vocab_size} "
            "entries: --data-path was made with another tokenizer than --tokenizer-model or "
            f"--vocab-size say{older if wrong[0] == vocab_size else ''}"
        )


def build_gpt_dataset(indexed: IndexedDataset, request: SplitRequest) -> GPTDataset:
    """Return one split of a corpus, with at least as many samples as requested, or one epoch.

    `TooFewTokensError` if it has no sample.
    """
    config, split, prefix = request.config, request.config.split_in_use, indexed.prefix
    plan = plan_split(indexed, request)
    lengths = indexed.sequence_lengths()
    if config.sft:
        lengths = np.full_like(lengths, plan.seq_length)
    # Megatron's facts identify sizes instead of the tokenizer.
    facts = {
        "class": "GPTDataset",
        "dataset_path": prefix,
        "num_samples": request.num_samples,
        "index_split": request.split_name,
        "random_seed": config.seed,
        "sequence_length": config.seq_length,
        "split": split,
        "split_matrix": None if split is None else split_matrix(split),
        # Files rewritten under the same prefix thereby never get the old order.
        "sequence_lengths_crc32": crc32(lengths.data),
        **({"sft": True} if config.sft else {}),
    }
    folder = config.cache_folder(prefix)
    entry = CacheEntry(folder=folder, split_name=request.split_name, facts=facts)
    order, source = cached(entry, SampleOrder, lambda: build_order(lengths, plan))
    return GPTDataset(indexed, plan, order, vocab_size=request.vocab_size, source=source)


def plan_split(indexed: IndexedDataset, request: SplitRequest) -> OrderPlan:
    """Plan the epochs and samples of the order of a split."""
    config, split_name = request.config, request.split_name
    split, seq_length = config.split_in_use, config.seq_length
    bounds = split_bounds(split, split_name, len(indexed))
    tokens, shared_tokens = indexed.tokens_in(bounds.start, bounds.stop), 1
    if config.sft:
        tokens, shared_tokens = len(bounds) * seq_length, 0
    if tokens < seq_length + shared_tokens:
        cause = "there are" if split is None else f"--split {split!r} leaves"
        raise TooFewTokensError(
            f"--seq-length {seq_length} is longer than the data: {cause} {tokens} tokens "
            f"of {request.flag} {indexed.prefix} for {PURPOSES[split_name]} and one sample takes "
            f"{seq_length + shared_tokens}"
        )
    return OrderPlan(
        bounds=bounds,
        tokens_per_epoch=tokens,
        num_samples=request.num_samples,
        seq_length=seq_length,
        seed=config.seed,
        shared_tokens=shared_tokens,
    )


def check_answers(corpora: Mapping[str, Sequence[GPTDataset]]) -> None:
    """Raise `UserError` for a data set none of whose samples has an answered token."""
    for name, members in corpora.items():
        if members and not any(map(_has_answer, members)):
            prefixes = listed([member.indexed.prefix for member in members[:NAMED]])
            raise UserError(
                f"{name}: no sample of --seq-length {members[0].plan.seq_length} of {prefixes} has "
                "an answered token, so there is no loss: raise --seq-length, give other data, or "
                "see what is answered with tools/inspect_dataset.py"
            )


def check_rows(corpora: Mapping[str, Sequence[GPTDataset]], rows: int) -> None:
    """Raise `UserError` for a token id without a row in a model whose vocabulary is frozen."""
    for corpus in chain.from_iterable(corpora.values()):
        most = max((int(ids.max()) for ids in scanned(corpus.indexed)), default=0)
        if most >= rows:
            prefix = corpus.indexed.prefix
            raise UserError(
                f"{bin_path(prefix)} holds token id {most}, and the model of --load has "
                f"{rows} vocabulary rows, which are frozen, so that it would never be learnt: give "
                "a base with a row for every id of its tokenizer (transformers: "
                "resize_token_embeddings), or train its vocabulary rows too, without adapters"
            )


def _has_answer(corpus: GPTDataset) -> bool:
    """Return whether any label is answered; read up to the first conversation with one."""
    if corpus.indexed.loss_mask_file is None:
        return True
    plan = corpus.plan
    end = plan.seq_length if plan.shared_tokens == 0 else None
    return any((corpus.indexed.marks(each)[1:end] == TRAINED).any() for each in plan.bounds)
