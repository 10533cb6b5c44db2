"""The benchmark of documents kept apart: every length has its line, and mistakes have one."""

from __future__ import annotations

import re

import pytest
import torch

from tools.bench.bench_documents import main

SMALL = ["--seq-length", "16", "--num-layers", "1", "--hidden-size", "64", "--rounds", "1"]


@pytest.fixture(autouse=True)
def _threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _number: None)


def test_every_length_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--lengths", "4,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shape = r"documents of (\d+) of 16 tokens: \d+\.\d\d of a pass without \(median of 1 pairs\)"
    assert [found and found[1] for found in (re.fullmatch(shape, line) for line in lines)] == [
        "4",
        "16",
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lengths", "4,0"], "--lengths '4,0': give numbers of tokens, e.g. 8,64,128"),
        (["--lengths", "5"], "--seq-length 16 is not a multiple of --lengths 5"),
        (["--hidden-size", "65"], "--hidden-size 65 is not a multiple of 64"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
    ],
)
def test_mistakes_end_with_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *flags]) == 2
    assert capsys.readouterr().err == f"bench_documents.py: error: {told}\n"
