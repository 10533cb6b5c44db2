"""Texts are encoded in tasks, by workers whose results come in order, with a report of progress."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from data.corpus import read_batches
from data.sources import find_pieces
from data.tokenizer import NullTokenizer
from data.tokenizer_config import TokenizerConfig
from tests.helpers.refusals import refused
from tools.preprocessing import encode as module
from tools.preprocessing import progress as progress_module
from tools.preprocessing.encode import EncodingPlan, Tally, encode, tasks_of
from tools.preprocessing.progress import Progress, elapsing
from tools.preprocessing.workers import TASKS_PER_WORKER, worker_processes

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


def slow_if_even(number: int) -> int:
    time.sleep(0.02 * (number % 2 == 0))
    return number * number


@pytest.mark.process
def test_order_and_how_far_ahead_tasks_are_taken() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(60):
            taken += 1
            yield number

    with worker_processes(2, int) as workers:
        ahead = []
        for number, result in enumerate(workers.map(slow_if_even, tasks())):
            assert result == number * number
            ahead.append(taken - number)
    assert len(ahead) == 60
    assert max(ahead) <= 2 * TASKS_PER_WORKER
    with worker_processes(1, int) as workers:
        assert list(workers.map(slow_if_even, range(3))) == [0, 1, 4]


def test_lines_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(total_bytes=2**24, interval=10)
    progress.passed_over(2**23)
    now = 102.0
    progress.count(Tally(documents=9, num_bytes=2**20, advance=2**20))
    assert capsys.readouterr().err == ""
    progress.count(Tally(documents=12, num_bytes=2**20, advance=2**20))
    assert capsys.readouterr().err == (
        "Processed 21 documents (10.5 docs/s, 1.00 MB/s). 62% done, 0:00:06 left.\n"
    )
    now = 104.0
    progress.finish()
    assert capsys.readouterr().err == "Processed 21 documents (5.2 docs/s, 0.50 MB/s).\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(total_bytes=1000, interval=1)
    progress.count(Tally(documents=7, num_bytes=500, advance=500))
    progress.count(Tally(documents=7, num_bytes=500, advance=500))
    progress.finish()
    text = terminal.getvalue()
    assert "100%|" in text
    assert "14 documents" in text
    assert "B/s" in text
    assert text.splitlines()[-1].startswith("Processed 14 documents (")


def test_a_call_that_tells_nothing_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_NOTICE_SECONDS", 0.01)
    with elapsing("training"):
        time.sleep(0.1)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "training"
    assert set(others) == {"training, 0:00:00"}
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with elapsing("training"):
        pass
    assert "training, 00:00" in terminal.getvalue()
