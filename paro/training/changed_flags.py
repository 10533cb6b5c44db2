"""Finds flags that changed since a checkpoint and alter the sample order or the schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from data.blend import PHASES
from data.blended_dataset import PhasedDataset
from data.config import DataConfig
from data.loader import Datasets
from data.sample_order import parse_split
from paro.checkpoint.config import as_read
from paro.config.train import TrainConfig
from paro.errors import flag_of
from paro.files.checksum import crc32
from paro.schedule.batch_schedule import BatchSchedule
from paro.schedule.lr_schedule import ScheduleConfig

Record = Mapping[str, Any]

_SHOWN = 3  # at most so many corpora of a blend are named in a line
_DIGITS = 12  # decimals to which blend weights are rounded: 0.3 A 0.7 B equals 3 A 7 B

# Field of ScheduleConfig: its flags. Without a flag, a length follows from the run's length.
_LENGTHS = {
    "lr_decay_samples": "--lr-decay-iters (or -samples)",
    "lr_warmup_samples": "--lr-warmup-iters (or -samples, -fraction)",
    "lr_wsd_decay_samples": "--lr-wsd-decay-iters (or -samples)",
}
_WEIGHT_DECAY = {
    "start_weight_decay": "--start-weight-decay (or --weight-decay)",
    "end_weight_decay": "--end-weight-decay (or --weight-decay)",
}
_START, _END = _WEIGHT_DECAY
_TOTAL = "weight_decay_incr_samples"  # this field is always the run's number of training samples


def order_record(
    data: DataConfig, train: TrainConfig, batches: BatchSchedule, datasets: Datasets
) -> dict[str, Any]:
    """Record, for a checkpoint, all flags and data that determine the order of training samples."""
    phases, blends, flag = {}, {}, "--mock-data"
    if isinstance(datasets.train, PhasedDataset):
        flag, phases = PHASES, {phase.name: phase.samples for phase in datasets.train.phases}
        pairs = zip(datasets.train.phases, datasets.train.data_sets, strict=True)
        blends = {phase.name: phase.blend for phase, samples in pairs if samples is not None}
    elif not data.mock_data:
        blends = {"": data.blends()["train"]}
        flag = blends[""].flag.rstrip(":")
    record = {
        "seed": data.seed,
        "split": None if data.mock_data else data.split_in_use,
        "seq_length": data.seq_length,
        "sft": data.sft,
        "data_flag": flag,
        "corpora": [],
        "epochs": datasets.train_order(),
        **_length_record(train, batches),
        **({"phases": phases} if phases else {}),
    }
    read = {corpus.indexed.prefix: corpus.indexed for corpus in datasets.corpora()["train"]}
    for name, blend in blends.items():
        weights = [None] * len(blend.prefixes) if blend.weights is None else blend.shares()
        record["corpora"] += [
            {
                "prefix": prefix,
                "weight": None if weight is None else round(weight, _DIGITS),
                "tokens": read[prefix].num_tokens,
                "sequence_lengths_crc32": crc32(read[prefix].sequence_lengths().data),
                "tokenizer": made.digest if (made := read[prefix].made_with) else None,
                **({"phase": name} if name else {}),
            }
            for prefix, weight in zip(blend.prefixes, weights, strict=True)
        ]
    return record


def order_changes(common: Record, order: Record) -> Iterator[str]:
    """Yield a line for every flag that changed the `order` of training samples since the save.

    Older checkpoints have no record of the order, at most the number of epochs.
    """
    consumed = common["state"]["consumed_train_samples"]
    saved = _in_phase(common.get("order") or {"epochs": common.get("train_order")}, consumed)
    now = _in_phase(as_read(order), consumed)
    if now["phase_start"] == consumed > 0:
        return  # nothing of the phase has been read yet
    changes = list(_data_changes(saved, now))
    if not changes and saved["epochs"] not in (None, now["epochs"]):
        causes = " and ".join(_length_changes(saved, now)) or "the number of samples changed"
        changes = [f"{causes}: the data are shuffled for another number of epochs"]
    for change in changes:
        yield (
            f"{change}; reading continues after sample {consumed} of another order: samples may "
            "repeat or be left out"
        )


def _in_phase(record: Record, consumed: int) -> dict[str, Any]:
    """Return the record with the corpora of the phase that has the next sample, and its start."""
    start, phases = 0, record.get("phases") or {}
    for name, samples in phases.items():
        if samples is None or consumed < start + samples:
            places = [i for i, corpus in enumerate(record["corpora"]) if corpus["phase"] == name]
            parts = {key: [record[key][place] for place in places] for key in ("corpora", "epochs")}
            return {**record, **parts, "phase_start": start}
        start += samples
    return {**record, "phase_start": start}


def schedule_change(
    common: Record, schedule: ScheduleConfig, train: TrainConfig, batches: BatchSchedule
) -> str | None:
    """Name the flag that changed the learning rate or weight decay schedule, if one did."""
    saved, now = common.get("schedule") or {}, as_read(asdict(schedule))
    saved = as_read(saved, schedule) if saved else {}
    differ = [name for name in now if name in saved and saved[name] != now[name]]
    if _TOTAL in differ and all(each.get(_START) == each.get(_END) for each in (saved, now)):
        differ.remove(_TOTAL)  # weight decay is constant
    for name in differ:
        if name != _TOTAL and not (name in _LENGTHS and _follows_total(name, saved, now)):
            return _change(name, saved, now)
    if not differ:
        return None
    lengths = as_read(_length_record(train, batches))
    causes = list(_length_changes(common.get("order") or {}, lengths))
    cause = " and ".join(causes) or "--train-iters, --train-samples or --global-batch-size changed"
    return f"{cause}: it ends after {now[_TOTAL]} samples instead of {saved[_TOTAL]}"


def _length_record(train: TrainConfig, batches: BatchSchedule) -> dict[str, Any]:
    """Record the flags that determine the number of samples that the run trains on."""
    return {
        "train_iters": None if train.train_samples else train.train_iters,
        "train_samples": train.train_samples,
        "global_batch_size": batches.global_batch_size,
        "rampup_batch_size": batches.rampup_batch_size,
    }


def _length_changes(saved: Record, now: Record) -> Iterator[str]:
    for name in ("train_iters", "train_samples", "global_batch_size", "rampup_batch_size"):
        if name in saved and saved[name] != now[name]:
            yield _change(name, saved, now)


def _data_changes(saved: Record, now: Record) -> Iterator[str]:
    consequences = {
        "seed": "the data are shuffled in another way",
        "split": "validation and test may read documents that were trained on",
        "seq_length": "the data are cut into samples elsewhere",
        "sft": "the data are cut into samples elsewhere",
    }
    start, new_start = saved["phase_start"], now["phase_start"]
    if start != new_start:
        yield f"{PHASES}: the phase that is read began after sample {start}, now after {new_start}"
    for name, follows in consequences.items():
        if name in saved and not _is_same(saved[name], now[name]):
            yield f"{_change(name, saved, now)}: {follows}"
    if "corpora" in saved and _contents(saved) != _contents(now):
        before, after = _corpora_text(saved, now), _corpora_text(now, saved)
        if before == after:
            yield f"{after}: its documents changed, or their order"
        else:
            yield f"the training data were {before} and are {after}"


def _is_same(before: Any, after: Any) -> bool:
    """Return whether two values are equal; splits are equal if they cut at equal positions."""
    if isinstance(before, str) and isinstance(after, str):
        return parse_split(before) == parse_split(after)
    return bool(before == after)


def _contents(record: Record) -> list[tuple[Any, ...]]:
    """Return the corpora without paths: moving a data folder does not change the data."""
    names = ("weight", "tokens", "sequence_lengths_crc32")
    return [tuple(corpus[name] for name in names) for corpus in record["corpora"]]


def _corpora_text(record: Record, other: Record) -> str:
    """Describe the data flag and the corpora that `other` lacks; all corpora if it lacks none."""
    contents = _contents(other)
    pairs = zip(record["corpora"], _contents(record), strict=True)
    changed = [corpus for corpus, content in pairs if content not in contents]
    corpora = changed or record["corpora"]
    words = [
        f"{'' if corpus['weight'] is None else format(corpus['weight'], 'g') + ' '}"
        f"{corpus['prefix']} ({corpus['tokens']:,} tokens)"
        for corpus in corpora[:_SHOWN]
    ]
    more = len(corpora) - _SHOWN
    if more > 0:
        words.append(f"{more} more")
    return " ".join([record["data_flag"], ", ".join(words)]).strip()


def _follows_total(name: str, saved: Record, now: Record) -> bool:
    """Return whether a length is derived: it changed in proportion to the run's samples."""
    before, after = saved[name], now[name]
    if before is None or after is None or saved[_TOTAL] == now[_TOTAL]:
        return False
    return math.isclose(before * now[_TOTAL], after * saved[_TOTAL], rel_tol=1e-9)


def _change(name: str, saved: Record, now: Record) -> str:
    unit = " samples" if name in _LENGTHS else ""
    before, after = (
        " ".join(map(str, value)) if isinstance(value, list) else f"{value}{unit}"
        for value in (saved[name], now[name])
    )
    flag = (_LENGTHS | _WEIGHT_DECAY).get(name, flag_of(name))
    return f"{flag} was {before} and is {after}".replace(f"None{unit}", "not given")
