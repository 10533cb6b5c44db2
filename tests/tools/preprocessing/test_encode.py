"""Ids are checked against the vocabulary before writing, and counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from data.corpus import read_batches
from data.sources import find_pieces
from data.tokenizer import NullTokenizer
from data.tokenizer_config import TokenizerConfig
from tests.helpers.refusals import refused
from tools.preprocessing import encode as module
from tools.preprocessing.encode import EncodingPlan, Tally, encode, tasks_of

CONFIG = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=11)
PLAN = EncodingPlan(tokenizer=CONFIG, keys=("text",), append_eod=True)


class Wrong(NullTokenizer):
    """Returns an id outside its vocabulary."""

    def __init__(self, token: int) -> None:
        super().__init__(11)
        self.token = token

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[1, self.token] for _ in texts]


@pytest.mark.parametrize("token", [11, 65536, 2**31, 2**40, -1])
def test_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n')
    monkeypatch.setattr(module, "tokenizer_of", lambda config: Wrong(token))
    (batch,) = read_batches(find_pieces([path]), PLAN.keys)
    refused(lambda: encode(PLAN, batch), f"{path}, line 1 ... token id {token},")
    monkeypatch.setattr(module, "tokenizer_of", lambda config: Wrong(10))  # the last one
    assert encode(PLAN, batch).by_key[0].ids.tolist() == [1, 10, 10]


def test_small_texts_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("12345")
    monkeypatch.setattr(module, "BATCH_BYTES", 15)
    tasks = list(tasks_of(read_batches(find_pieces([tmp_path]), PLAN.keys)))
    assert [len(task) for task in tasks] == [3, 3, 3, 1]
    assert [Path(batch.piece.path).stem for task in tasks for batch in task] == list("0123456789")


def test_tallies_add_up_and_name_a_few() -> None:
    one = Tally(documents=1, num_bytes=2, advance=3, skipped=2, named=("a", "b"))
    assert Tally() + one == one
    assert one + one == Tally(documents=2, num_bytes=4, advance=6, skipped=4, named=("a", "b", "a"))
