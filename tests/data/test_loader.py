"""Micro-batches in Megatron's order, with and without worker processes; data from flags."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.batch import BatchFetcher, Sample
from data.config import DataConfig, DocumentRules
from data.loader import Batch, Datasets, MicroBatches, Samples, SplitCounts, build_datasets
from tests.helpers.corpora import write_corpus
from tests.helpers.refusals import refused, says

SEQ = 4
NUM_WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]


class Numbered:
    """Sample i is i, i + 1, ..., so a batch shows which samples it contains."""

    def __init__(
        self, length: int = 1000, *, broken_at: int = -1, error: Exception | None = None
    ) -> None:
        self.length, self.broken_at, self.error = length, broken_at, error

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index == self.broken_at:
            raise self.error
        return Sample(np.arange(index, index + SEQ + 1))

    def describe(self) -> str:
        return "numbers"


def batches_of(samples: Samples | None = None, **fields: Any) -> MicroBatches:
    """Of numbered samples, one by one, unless other fields are given."""
    of_fetch = {name: fields.pop(name) for name in {*fields} & {*BatchFetcher.__annotations__}}
    fetch = BatchFetcher(samples or Numbered(), **of_fetch)
    return MicroBatches(fetch, **{"micro_batch_size": 1} | fields)


def samples_in(batch: Batch) -> list[int]:
    numbers: list[int] = batch.tokens_BS[:, 0].tolist()
    return numbers


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_order_is_megatrons_and_the_global_random_state_is_left_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    for rank, size, consumed in ((0, 2, 12), (1, 2, 12), (2, 3, 7)):
        place = {"data_parallel_rank": rank, "data_parallel_size": size, "micro_batch_size": 3}
        batches = batches_of(**place, consumed_samples=consumed, num_workers=num_workers)
        drawn = [samples_in(batch) for batch in islice(batches, 4)]
        begins = [consumed + (m * size + rank) * 3 for m in range(4)]
        assert drawn == [[begin, begin + 1, begin + 2] for begin in begins]
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_follow_tokens_and_a_batch_moves_as_a_whole() -> None:
    batch = next(batches_of(micro_batch_size=2))
    assert batch.tokens_BS.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert batch.labels_BS.tolist() == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert batch.loss_mask_BS.tolist() == [[1.0] * 4] * 2
    assert (batch.tokens_BS.dtype, batch.loss_mask_BS.dtype) == (torch.int64, torch.float32)
    assert batch.tokens_BS.is_contiguous() is batch.labels_BS.is_contiguous() is True
    assert batch.documents() == {"positions_BS": None, "document_lengths": None}
    moved = batch.to(torch.device("meta"))
    parts = (moved.tokens_BS, moved.labels_BS, moved.loss_mask_BS)
    assert {part.device.type for part in parts} == {"meta"}


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_batches_tell_where_documents_end_when_asked(num_workers: int) -> None:
    rules = DocumentRules(eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    batch = next(batches_of(micro_batch_size=2, num_workers=num_workers, rules=rules, eod=2))
    # 0 1 2 3, and 1 2 3 4
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch.document_lengths == (3, 1, 2, 2)
    assert batch.loss_mask_BS.tolist() == [[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]]
    moved = batch.to(torch.device("meta"))
    assert moved.positions_BS.device.type == "meta"
    assert moved.documents()["document_lengths"] == (3, 1, 2, 2)


def test_a_part_of_each_sample_keeps_what_whole_samples_say() -> None:
    rules = DocumentRules(eod_mask_loss=True, reset_attention_mask=True)
    fetch = {"rules": rules, "eod": 2, "ranges": (range(1), range(3, 4))}
    batch = next(batches_of(micro_batch_size=2, **fetch))
    # 0 1 2 3, and 1 2 3 4
    assert batch.tokens_BS.tolist() == [[0, 3], [1, 4]]
    assert batch.labels_BS.tolist() == [[1, 4], [2, 5]]  # shifted before
    assert batch.loss_mask_BS.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert batch.mask_sum == 6.0
    assert batch.positions_BS.tolist() == [[0, 3]]
    assert batch.documents()["document_lengths"] == (3, 1, 2, 2)
    assert (batch.ranges, batch.documents()["seq_length"]) == (fetch["ranges"], 4)


@pytest.mark.process
def test_workers_are_out_of_reach_of_a_signal_to_the_group() -> None:
    """torchrun sends SIGTERM to the process group of a rank, which may still have to save."""
    batches = batches_of(num_workers=1)
    before = set(multiprocessing.active_children())
    assert samples_in(next(batches)) == [0]
    (worker,) = set(multiprocessing.active_children()) - before
    assert os.getpgid(worker.pid or 0) == worker.pid


def test_whole_rounds_are_filled_up_with_masked_samples() -> None:
    drawn, masked = [], []
    for rank in range(2):
        place = {"data_parallel_rank": rank, "data_parallel_size": 2, "micro_batch_size": 3}
        batches = batches_of(Numbered(10), **place, whole=True)
        drawn.append([])
        for batch in islice(batches, 4):
            kept = batch.loss_mask_BS[:, 0] > 0
            drawn[rank].append(batch.tokens_BS[kept, 0].tolist())
            masked.append(int((~kept).sum()))
            assert torch.equal(batch.loss_mask_BS.amin(1), batch.loss_mask_BS.amax(1))
    assert drawn == [[[0, 1, 2], [6, 7, 8]] * 2, [[3, 4, 5], [9]] * 2]
    assert sum(masked) == 4
    batches = batches_of(Numbered(4), micro_batch_size=3, whole=True, ranges=(range(2),))
    assert [batch.mask_sum for batch in islice(batches, 2)] == [3 * 4.0, 4.0]


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_come_in_page_locked_memory(num_workers: int) -> None:
    whole = {"micro_batch_size": 20, "num_workers": num_workers, "pin_memory": True}
    batches = batches_of(Numbered(20), **whole)
    batch = next(batches)
    assert batch.tokens_BS.is_pinned()
    assert batch.loss_mask_BS.is_pinned()
    assert batch.to(torch.device("cuda"), non_blocking=True).labels_BS[0].tolist() == [1, 2, 3, 4]
    refused(lambda: next(batches), "ends after 20 samples")


def built(*words: str, counts: Sequence[int | None] = (10, 5, 5), **fields: Any) -> Datasets:
    """Samples of 8 tokens from these words of --data-path, so many for each split."""
    sources = {"data_path": words} if words else {}
    config = DataConfig(**{"seq_length": 8, **sources, **fields})
    by_split = dict(zip(("train", "valid", "test"), counts, strict=False))
    return build_datasets(config, SplitCounts(**by_split), 200, None)


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_corpus_splits(prefix: str, num_workers: int) -> None:
    datasets = built(prefix, split="90,10,0")
    assert len(datasets.train) >= 10
    assert [*datasets.valid] == [""]
    assert datasets.test is None
    batch = next(batches_of(datasets.train, micro_batch_size=4, num_workers=num_workers))
    assert batch.labels_BS[0].tolist() == datasets.train[0].text[1:].tolist()
    evaluated = built(prefix, split="90,10,0", counts=(0, 5))
    assert len(evaluated.valid[""]) >= 5, "evaluation alone needs no training samples"


def test_what_the_number_of_samples_does_to_their_order(prefix: str) -> None:
    """An epoch has 2000 tokens, 249 samples."""
    assert built(prefix, counts=(100,), split="1,0,0").train_order() == [[1, 0]]
    assert built(prefix, counts=(400,), split="1,0,0").train_order() == [[2, 249]]
    weighted = built("1", prefix, "1", prefix, counts=(400,), split="1,0,0")
    assert weighted.train_order() == [[1, 0], [1, 0]]
    assert built(counts=(400,), mock_data=True).train_order() == []


def test_a_held_out_split_without_a_sample_is_named_in_one_line(prefix: str) -> None:
    assert built("1", prefix, split="99,1,0").valid
    datasets = built("1", prefix, split="99,1,0", seq_length=30)
    assert not datasets.valid
    left_out = (
        "valid: no samples ... left out: --seq-length 30 ... --split '99,1,0' leaves 20 tokens"
    )
    says(datasets.describe()[1], left_out)
    assert datasets.describe()[2] == "test: no samples"


def test_training_data_without_weights_are_not_read_twice(prefix: str) -> None:
    datasets = built(prefix, prefix, split="90,10,0", counts=(10, 500))
    assert len(datasets.valid[""]) == 500
    once = 2 * ((200 - 1) // 8)  # samples of the validation split of both
    first, again = (datasets.valid[""][i].text.tolist() for i in (3, 3 + once))
    assert first == again
    assert f"500 samples in {500 / once:.2f} rounds" in datasets.describe()[1]
    more = partial(built, prefix, prefix, split="90,10,0", counts=(1000,))
    refused(more, "without weights ... 1000")


def test_a_corpus_without_a_sample_is_left_out_of_a_held_out_blend(
    prefix: str, tmp_path: Path
) -> None:
    words = ("1", prefix, "2", str(write_corpus(tmp_path / "small", [[[1, 2, 3]]])))
    datasets = built(train_data_path=(prefix,), valid_data_path=words)
    assert f"nothing of {tmp_path / 'small'}: too few tokens" in datasets.describe()[1]
    message = "3 tokens of --train-data-path ... small for training"
    refused(lambda: built(train_data_path=words), message)


def test_each_phase_has_an_order_of_its_own_and_those_that_are_over_are_not_opened(
    prefix: str, tmp_path: Path
) -> None:
    other = str(write_corpus(tmp_path / "other", [[range(200, 290)]]))
    file = tmp_path / "phases.json"
    phases: list[dict[str, Any]] = [
        {"name": "first", "samples": 7, "data": [0.3, prefix, 0.7, other]},
        {"name": "second", "samples": 5, "data": [other]},
        {"name": "third", "data": prefix},
    ]

    def build(total: int = 20, **counts: int) -> Samples:
        file.write_text(json.dumps(phases))
        config = DataConfig(seq_length=8, data_phases=str(file), valid_data_path=(other,))
        return build_datasets(config, SplitCounts(train=total, **counts), 999, None).train

    def alone(phase: dict[str, Any], samples: int) -> list[list[int]]:
        words = phase["data"].split() if isinstance(phase["data"], str) else phase["data"]
        config = DataConfig(seq_length=8, train_data_path=tuple(map(str, words)))
        data_set = build_datasets(config, SplitCounts(train=samples), 999, None).train
        return [data_set[index].text.tolist() for index in range(samples)]

    whole = [sample.text.tolist() for sample in (build()[index] for index in range(20))]
    assert whole == [*alone(phases[0], 7), *alone(phases[1], 5), *alone(phases[2], 8)]
    assert build(30)[11].text.tolist() == whole[11]
    phases[0]["data"] = ["gone"]
    resumed = build(consumed=7)
    assert [resumed[index].text.tolist() for index in range(7, 20)] == whole[7:]
    assert "first, after sample 0: over" in resumed.describe()
    with pytest.raises(AssertionError, match="a phase that is over"):
        resumed[6]
    assert "third, after sample 12" in build(12, consumed=7).describe()
    assert "(the training ends before it)" in build(12, consumed=7).describe()
    assert "ends before it" not in build(13, consumed=7).describe()
    refused(lambda: build(consumed=6), "gone")
    phases[2]["samples"] = 7
    refused(lambda: build(consumed=7), f"--data-phases {file}, third ... 19 samples ... draws 20")


def test_a_vocabulary_smaller_than_the_ids_or_a_missing_corpus_is_refused(prefix: str) -> None:
    config = DataConfig(seq_length=8, data_path=(prefix,))
    small = partial(build_datasets, config, SplitCounts(train=10), vocab_size=100, tokenizer=None)
    refused(small, "token id 118, ... 100 entries")
    refused(lambda: built(f"{prefix}-none"), "--data-path")


def test_senseless_configurations_are_refused() -> None:
    for fields, message in (
        ({"mock_data": True, "data_path": ("x",)}, "--mock-data and --data-path contradict"),
        ({}, "give --data-path PREFIX, or --mock-data"),
        ({"data_path": ("0.5", "x", "y")}, "--data-path ... do not match"),
        ({"data_path": ("x",), "data_args_path": "y"}, "--data-path and --data-args-path"),
        ({"data_args_path": "none"}, "--data-args-path none cannot be read"),
        ({"data_path": ("x",), "test_data_path": ("y",)}, "--data-path and --test-data-path"),
        ({"valid_data_path": ("x",)}, "give --train-data-path"),
        ({"train_data_path": ("x",), "split": "1,1,1"}, "--split and --train-data-path contradict"),
        ({"data_phases": "none"}, "--data-phases none cannot be read"),
        ({"data_phases": "x", "train_data_path": ("y",)}, "--data-phases and --train-data-path"),
        ({"data_phases": "x", "data_path": ("y",)}, "--data-path and --data-phases"),
        ({"mock_data": True, "sft": True}, "--sft ... --mock-data"),
        ({"mock_data": True, "seq_length": 0}, "--seq-length 0"),
        ({"mock_data": True, "num_workers": -1}, "--num-workers -1"),
        ({"mock_data": True, "seed": -1}, "--seed -1"),
        *(
            ({"mock_data": True, "split": text}, f"--split '{text}'")
            for text in ("a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1")
        ),
    ):
        refused(partial(DataConfig, **{"seq_length": 8, **fields}), message)
