"""The benchmark of models: equal losses or no result, figures of the seconds, mistakes."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import measured
from tests.helpers.margins import assert_near
from tests.helpers.warm_python import run_python
from tools.bench.bench_model import main, make_parser, task_of
from tools.bench.model_speed.contenders import CONTENDERS, DEFAULT

SCRIPT = "tools/bench/bench_model.py"
VOCAB_SIZE = 64
TINY = [
    *("--num-layers", "2", "--hidden-size", "16", "--ffn-hidden-size", "32"),
    *("--num-attention-heads", "2", "--vocab-size", str(VOCAB_SIZE), "--seq-length", "8"),
    *("--micro-batch-size", "2", "--rounds", "2", "--steps", "1", "--threads", "1"),
]


def check_rows(written: dict[str, Any]) -> None:
    """Every contender ran two rounds from the same loss; its figures follow from the seconds."""
    rows = written["rows"]
    assert [row["contender"] for row in rows] == list(DEFAULT)
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


def test_all_contenders_start_from_the_same_loss() -> None:
    told, written = measured(main, *TINY)
    check_rows(written)
    assert written["rows"][0]["first_loss"] == pytest.approx(math.log(VOCAB_SIZE), rel=0.05)
    names = re.findall(r"^(\S+) +\d+ tokens/s, ", told, re.MULTILINE)
    assert names == list(DEFAULT)
    assert len(re.findall(r"^round +\d, seconds: ", told, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", ["ours", "trainer", "transformers", "transformers-fused"])
def test_all_contenders_clip(name: str) -> None:
    """A norm far below AdamW's epsilon leaves nothing of an update but weight decay."""
    before, clipped = losses_of(name, clip_grad=1e-12)
    assert_near([clipped], [before], 1e-6, name)
    before, after = losses_of(name, clip_grad=0.0)
    assert after < before * (1.0 - 1e-4)


@pytest.mark.verify
def test_the_compiled_model_trains_as_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled = losses_of("ours-compiled", clip_grad=1.0)
    assert_near(compiled, losses_of("ours", clip_grad=1.0), 1e-6, "compiled")


def losses_of(name: str, *, clip_grad: float) -> list[float]:
    """Of the first two steps."""
    task = task_of(make_parser().parse_args([*TINY, "--clip-grad", str(clip_grad)]))
    step = CONTENDERS[name](task)
    return [float(step()) for _ in range(2)]


@pytest.mark.verify
@pytest.mark.process
def test_contenders_alone_in_their_processes(tmp_path: Path) -> None:
    """One that fails is a row and status 1; the others have their speeds and their peaks."""
    file = tmp_path / "figures.json"
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "transformers.py").write_text("raise ImportError('hidden')\n")
    words = [SCRIPT, *TINY, "--own-process", "--contenders", "ours,transformers", "--json", file]
    done = run_python(words, PYTHONPATH=str(tmp_path / "hidden"))
    assert done.returncode == 1
    ours, other = json.loads(file.read_text())["rows"]
    assert ours["peak_bytes"] > 10**8  # of the process, torch included
    assert len(ours["seconds"]) == 2
    message = "the comparison needs transformers: pip install transformers"
    line = f"transformers           failed: {message}"
    assert other == {"contender": "transformers", "failure": message, "line": line}
    assert line in done.stdout


@pytest.mark.process
def test_a_contender_is_stopped_at_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = [*TINY, "--own-process", "--contenders", "ours", "--most-seconds", 0.1, "--json", file]
    done = run_python([SCRIPT, *words, "--steps", 10**6])
    assert done.returncode == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["failure"] == "stopped after 0.1 s"
