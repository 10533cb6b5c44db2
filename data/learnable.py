"""What data need so that a run can learn from them: answered tokens, and ids that have a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from data.gpt_dataset import GPTDataset, scanned
from data.indexed_dataset import bin_path
from data.loss_mask import TRAINED
from paro.errors import UserError
from paro.text import listed

Corpora = Mapping[str, Sequence[GPTDataset]]  # of each data set, by its name
_NAMED = 3  # corpora at most in a line


def check_answers(corpora: Corpora) -> None:
    """Raise `UserError` for a data set none of whose samples has an answered token."""
    for name, members in corpora.items():
        if members and not any(map(_has_answer, members)):
            prefixes = listed([member.indexed.prefix for member in members[:_NAMED]])
            raise UserError(
                f"{name}: no sample of --seq-length {members[0].plan.seq_length} of {prefixes} has "
                "an answered token, so there is no loss: raise --seq-length, give other data, or "
                "see what is answered with tools/inspect_dataset.py"
            )


def check_rows(corpora: Corpora, rows: int) -> None:
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
    """Tell whether a label is answered; read up to the first conversation that has one."""
    if corpus.indexed.loss_mask_file is None:
        return True
    plan = corpus.plan
    end = plan.seq_length if plan.shared_tokens == 0 else None
    sequences = range(plan.bounds.first, plan.bounds.last)
    return any((corpus.indexed.loss_mask(each)[1:end] == TRAINED).any() for each in sequences)
