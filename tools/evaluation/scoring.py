"""Log-likelihoods of continuations by a model, in batches of similar lengths."""

# Letters of shapes as in model/; N: all scored tokens of a batch.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.llama import Llama, TokenInfo
from model.rotary import rotations
from paro.errors import UserError
from tools.shared.finite import check_logits


class Score(NamedTuple):
    """The summed log-probability of a continuation, and whether greedy decoding gives it."""

    log_likelihood: float
    is_greedy: bool


Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context and its continuation


@torch.no_grad()
def scores_of(model: Llama, pairs: Sequence[Pair], *, max_length: int, size: int) -> list[Score]:
    """Return the score of every pair; `UserError` for one that has none, as where a part is empty.

    Contexts lose their first tokens where they are longer than `max_length`, continuations may not
    be. `size` pairs are computed at once, the longest first, so that memory does not grow later.
    """
    for pair in pairs:
        _check(*pair, max_length=max_length, rows=model.config.vocab_size)
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    scores: dict[int, Score] = {}
    for begin in range(0, len(order), size):
        numbers = order[begin : begin + size]
        batch = [pairs[number] for number in numbers]
        scores |= zip(numbers, _scores_of_batch(model, batch, max_length), strict=True)
    return [scores[number] for number in range(len(pairs))]


def _check(
    context: Sequence[int], continuation: Sequence[int], *, max_length: int, rows: int
) -> None:
    for what, ids in (("a question", context), ("an answer", continuation)):
        if not ids:
            raise UserError(
                f"{what} of a task has no token, so an answer has no likelihood: leave the task "
                "out, or that document"
            )
    if len(continuation) > max_length:
        raise UserError(
            f"an answer has {len(continuation)} tokens, and --seq-length is {max_length}: leave "
            "the task out, or raise it"
        )
    if max(*context, *continuation) >= rows:
        raise UserError(
            f"the tokenizer has an id above the {rows} vocabulary rows of the model, and a task "
            "uses it: leave the task out"
        )


def _scores_of_batch(model: Llama, pairs: Sequence[Pair], max_length: int) -> Iterator[Score]:
    device = model.embedding.weight.device
    texts = [[*context, *continuation][-max_length - 1 :] for context, continuation in pairs]
    longest = max(map(len, texts)) - 1
    # Padded at the end, where causal attention does not look.
    rows = [text[:-1] + [0] * (longest - len(text) + 1) for text in texts]
    x_BSD = _hidden_states(model, torch.tensor(rows, device=device))
    counts = [len(continuation) for _, continuation in pairs]
    ends = [len(text) - 1 for text in texts]
    parts = [x_SD[end - n : end] for x_SD, end, n in zip(x_BSD, ends, counts, strict=True)]
    labels = [token for _, continuation in pairs for token in continuation]
    labels_N = torch.tensor(labels, device=device)
    tied = model.config.tie_embeddings_and_output_weights
    tied_VD = model.embedding.weight if tied else None
    # Only these rows: logits of whole texts would take most of the memory.
    logits_NV = model.head(torch.cat(parts)[None], None, None, tied_VD)[0].float()
    chosen_N = logits_NV.gather(1, labels_N[:, None])[:, 0] - logits_NV.logsumexp(1)
    check_logits(chosen_N, x_BSD.dtype)
    greedy_N = logits_NV.argmax(1) == labels_N
    for values, hits in zip(chosen_N.split(counts), greedy_N.split(counts), strict=True):
        yield Score(float(values.sum()), bool(hits.all()))


def _hidden_states(model: Llama, tokens_BS: Tensor) -> Tensor:
    x_BSD: Tensor = model.embedding(tokens_BS)
    info = TokenInfo(*rotations(model.config, tokens_BS.shape[1], x_BSD.dtype, x_BSD.device))
    for block in model.blocks:
        x_BSD = block(x_BSD, info)
    return x_BSD
