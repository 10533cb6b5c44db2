"""The benchmark of preprocessing runs both contenders over the whole corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.sources import find_pieces
from data.tokenizer_config import TokenizerConfig
from tests.helpers.commands import measured, write_lines
from tools.bench.bench_preprocess import main, shares_of_texts
from tools.preprocessing.encode import EncodingPlan

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1001"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", *({"text": f"{i % 1000} 7"} for i in range(40_000)))


@pytest.mark.process
def test_a_pair_is_timed_and_written_down(corpus: Path, tmp_path: Path) -> None:
    told, figures = measured(main, "--rounds", 1, "--input", corpus, "--workers", 2, *NULL)
    (row,) = figures["rounds"]
    assert figures["bytes"] == corpus.stat().st_size
    assert row["ratio"] == row["bare"] / row["command"] == figures["ratio"]
    assert row["largest_process"] > 10e6
    assert 0 < figures["cpu_ratio"] < 1, "whole processes take more than a part of them"
    assert "of the bare tokenizer's speed (median of 1)" in told
    assert list(tmp_path.iterdir()) == [corpus]


def test_the_shares_are_the_corpus(corpus: Path) -> None:
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1001)
    plan = EncodingPlan(tokenizer=tokenizer, keys=("text",), append_eod=False)
    shares = [shares_of_texts(find_pieces([corpus]), plan, number, 3) for number in range(3)]
    assert all(share for share in shares)
    texts = [text for share in shares for batch in share for text in batch]
    assert sorted(texts) == sorted(f"{i % 1000} 7" for i in range(40_000))
