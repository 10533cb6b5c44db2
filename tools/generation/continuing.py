"""Continues token ids with a model: how tokens are sampled, when they end, and their text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from model.llama import Llama
from paro.errors import UserError
from tools.generation.decoding import Decoder
from tools.shared.finite import check_logits

UNFINISHED = "\ufffd"  # what decode returns for the bytes of an incomplete character


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The way in which the next token is sampled from the model's probabilities."""

    temperature: float  # 0: always the most probable token
    seed: int
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"--temperature {self.temperature} must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must be 0 (all tokens) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"--top-p {self.top_p} must be above 0 and at most 1")

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return one token, sampled among the most probable ones."""
        if self.temperature == 0.0:
            return int(logits_V.argmax())
        # In fp64, so that a tiny temperature gives the greedy choice and no overflow.
        shifted_V = (logits_V - logits_V.max()).double() / self.temperature
        probable_V, ids_V = shifted_V.softmax(0).sort(descending=True, stable=True)
        if self.top_k:
            probable_V = probable_V[: self.top_k]
        # The fewest tokens with at least top_p of the remaining probability, at least one.
        above_V = probable_V.cumsum(0) - probable_V
        probable_V = probable_V[above_V < self.top_p * probable_V.sum()]
        return int(ids_V[torch.multinomial(probable_V, 1, generator=generator)])


def continuations(
    model: Llama, prompts: Sequence[Sequence[int]], sampling: Sampling, *, num_ids: int
) -> Iterator[list[int]]:
    """Yield token after token for every prompt, endlessly; prompts are independent.

    Only ids below `num_ids` are sampled: rows of the output layer above are padding.
    """
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    device = model.embedding.weight.device
    decoder = Decoder(model)
    logits_BV = decoder.start(prompts)
    while True:
        rows = logits_BV[:, :num_ids].float().cpu()  # where the generators are
        check_logits(rows, logits_BV.dtype)
        tokens = [sampling.choose(*pair) for pair in zip(rows, generators, strict=True)]
        yield tokens
        logits_BV = decoder.step(torch.tensor(tokens, device=device))


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text that `tokens` add to `prompt`, in pieces that end with whole characters."""
    ids = list(prompt)
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


def until_ends(
    batch: Iterator[list[int]], num_texts: int, *, ends: frozenset[int], at_most: int
) -> Iterator[dict[int, int]]:
    """Yield tokens of the texts that had none of `ends`, by number; `at_most` each."""
    growing = set(range(num_texts))
    for _, tokens in zip(range(at_most), batch, strict=False):
        growing -= {row for row in growing if tokens[row] in ends}
        if not growing:
            return
        yield {row: tokens[row] for row in growing}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A model with its tokenizer, and how it continues texts."""

    model: Llama
    tokenizer: Tokenizer
    sampling: Sampling
    ends: frozenset[int]
    at_most: int

    def continued(self, begun: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
        """Return token after token of the texts that go on, by their numbers."""
        rows = self.model.config.vocab_size
        num_ids = min(self.tokenizer.vocab_size, rows)
        batch = continuations(self.model, begun, self.sampling, num_ids=num_ids)
        return until_ends(batch, len(begun), ends=self.ends, at_most=self.at_most)


def check_ids(tokenizer: Tokenizer, begun: Sequence[Sequence[int]], rows: int) -> None:
    """Raise `UserError` for an id beyond the model's vocabulary."""
    highest = max(max(ids) for ids in begun)
    if highest >= rows:  # a folder's tokenizer may add tokens that its model does not have
        token = " ".join(key for key, number in tokenizer.vocabulary.items() if number == highest)
        raise UserError(
            f"--prompt: the token {token!r} has the id {highest}, and the model has {rows} "
            "vocabulary rows: leave it out"
        )
