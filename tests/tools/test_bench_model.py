"""The race of models: equal losses or no result, figures that follow from the seconds, mistakes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script
from tools.bench_model import CONTENDERS, Result, check_losses, main

SCRIPT = "tools/bench_model.py"
VOCAB_SIZE = 64
TINY = [
    *("--num-layers", "2", "--hidden-size", "16", "--ffn-hidden-size", "32"),
    *("--num-attention-heads", "2", "--vocab-size", str(VOCAB_SIZE), "--seq-length", "8"),
    *("--micro-batch-size", "2", "--rounds", "2", "--steps", "1", "--threads", "1"),
]


def check_rows(written: dict[str, Any]) -> None:
    """Every contender ran two rounds from the same loss; its figures follow from the seconds."""
    rows = written["rows"]
    assert [row["contender"] for row in rows] == list(CONTENDERS)
    references = [row for row in rows if row["contender"].startswith("transformers")]
    for row in rows:
        assert row["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=1e-4)
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / (sum(row["seconds"]) / 2))
        others = [other for other in references if other is not row]
        assert row["ratios"].keys() == {other["contender"] for other in others}
        for other in others:
            pairs = zip(other["seconds"], row["seconds"], strict=True)
            ratio = sum(theirs / own for theirs, own in pairs) / 2
            assert row["ratios"][other["contender"]] == pytest.approx(ratio)


@pytest.mark.process
def test_all_contenders_start_from_the_same_loss(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run_script([SCRIPT, *TINY, "--json", file])
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    check_rows(written)
    assert written["rows"][0]["first_loss"] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
    told = re.findall(r"^(\S+) +\d+ tokens/s, ", done.stdout, re.MULTILINE)
    assert told == list(CONTENDERS)
    assert len(re.findall(r"^round +\d, seconds: ", done.stdout, re.MULTILINE)) == 2
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_model_may_be_is_the_same_for_all(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    more = ["--num-query-groups", "1", "--tie-embeddings-and-output-weights", "--recompute"]
    assert main([*TINY, *more, "--clock", "cpu", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    check_rows(written)
    assert written["clock"] == "cpu"
    # Embedding, 2 blocks of attention, MLP and 2 norms, the last norm; one head of keys and values.
    block = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16
    assert written["parameters"] == VOCAB_SIZE * 16 + 2 * block + 16


def test_models_that_differ_are_no_race() -> None:
    check_losses({"one": 4.0, "other": 4.0003}, tolerance=1e-4)
    for wrong in (4.1, math.nan):
        with pytest.raises(RuntimeError, match="first losses differ"):
            check_losses({"one": 4.0, "other": wrong}, tolerance=1e-4)


def test_a_ratio_is_the_median_of_neighbours_in_time() -> None:
    # The machine was ten times slower in the last round, for both.
    seconds = {"ours": [1.0, 1.0, 10.0], "theirs": [2.0, 3.0, 25.0]}
    result = Result(seconds=seconds, first_losses={}, tokens_per_turn=6)
    assert result.ratio("ours", "theirs") == 2.5
    assert result.tokens_per_second("ours") == 6.0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--contenders", "ours,what"], "--contenders knows ours, trainer, .* not what"),
        (["--num-attention-heads", "3"], "--hidden-size 16 is not divisible by --num-attention-h"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--json", "nowhere/figures.json"], "--json nowhere/figures.json: there is no folder"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"bench_model.py: error: {told}", line), line


@pytest.mark.process
def test_the_script_leaves_with_status_2_after_a_mistake() -> None:
    done = run_script([SCRIPT, *TINY, "--contenders", "what"])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
