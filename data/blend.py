"""Blends of corpora with weights, and phases of them, from the command line or from files."""

# A blend is a list of prefixes, either each after its weight, or all without weights. Without
# weights, the sizes of the corpora are the weights.

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from paro.errors import UserError, about, is_word
from paro.files.regular_file import read_text
from paro.files.schema import parse_json, read_json

SURPLUS = 0.005  # fraction of extra samples built of every corpus against rounding, as Megatron
MAX_CORPORA = np.iinfo(np.int16).max - 1
_MAX_PATH_CHARS = 4096  # Linux's limit
_SPLITS = (
    '; give {"train": [...], "valid": [...], "test": [...]}, each a list of weights and paths, or '
    "of paths"
)
PHASES = "--data-phases"
_PHASES = '; give [{"name": "web", "samples": 1000, "data": [0.7, "A", 0.3, "B"]}, ...]'


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Prefixes of corpora; weights are positive with any sum, or None to weight by size."""

    flag: str  # the flag that gave the blend, for messages
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def shares(self) -> list[float]:
        """Return the weights normalized to sum 1."""
        assert self.weights is not None, "a blend by size has no weights"
        weights = np.array(self.weights, dtype=np.float64)
        return [float(share) for share in weights / np.sum(weights)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPhase:
    """A blend that training reads for a number of samples, in an order of its own."""

    name: str
    samples: int | None  # None, of the last phase alone: the rest of the training
    blend: Blend


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A phase in the file of --data-phases."""

    name: str
    data: str | list[Any]
    samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """The file of --per-split-data-args-path."""

    train: str | list[Any] | None = None
    valid: str | list[Any] | None = None
    test: str | list[Any] | None = None


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """Parse `PREFIX`, `WEIGHT PREFIX WEIGHT PREFIX ...` or `PREFIX PREFIX ...` like Megatron.

    A word that is a number is a weight, so a prefix that looks like a number is written ./1.
    """
    if not words:
        raise UserError(f"{flag} names no corpus: give the prefix of a .bin and a .idx file")
    numbers = [number_in(word) for word in words]
    if all(number is None for number in numbers):
        return _checked(flag, [word.strip() for word in words], None)
    weights, prefixes = numbers[0::2], words[1::2]
    is_paired = len(words) % 2 == 0 and all(number is None for number in numbers[1::2])
    if not is_paired or None in weights:
        raise UserError(
            f"{flag} {' '.join(words)}: weights and paths do not match: give a weight before every "
            "path, or none at all"
        )
    return _checked(flag, [w.strip() for w in prefixes], [w for w in weights if w is not None])


def read_blend(path: str, flag: str) -> Blend:
    """Return a blend from a file: words as on the command line, or a JSON list that may be nested.

    In a list, a nested list may replace a path; its members divide the weight before it according
    to their own weights.
    """
    text = read_text(path, f"{flag} {path}")
    if not text.lstrip().startswith("["):
        return parse_blend(text.split(), f"{flag} {path}:")
    return parse_entries(parse_json(text, list[Any], f"{flag} {path}"), f"{flag} {path}:")


def read_blend_per_split(path: str, flag: str) -> dict[str, Blend]:
    """Read the blends of train, valid and test from a JSON object: words or a list under each."""
    with about(suffix=_SPLITS):
        splits = asdict(read_json(Path(path), _Splits, f"{flag} {path}"))
    flags = {name: f"{flag} {path}, {name}:" for name, words in splits.items() if words}
    return {name: parse_entries(splits[name], of_split) for name, of_split in flags.items()}


def read_phases(path: str) -> tuple[DataPhase, ...]:
    """Read the file of --data-phases: a JSON list of phases, each with a name and a blend."""
    with about(suffix=_PHASES):
        entries: list[_Entry] = read_json(Path(path), list[_Entry], f"{PHASES} {path}")
        if not entries:
            raise UserError(f"{PHASES} {path} has no phase")
    uses = Counter(entry.name for entry in entries)
    phases = []
    for number, entry in enumerate(entries, 1):
        what, name = f"{PHASES} {path}, phase {number}:", entry.name
        # Fields of a log line are between bars.
        is_name = name.isprintable() and name == name.strip() != "" and "|" not in name
        if not is_name or uses[name] > 1:
            raise UserError(f"{what} {name!r} is no name, or not its alone: give another")
        if entry.samples is None and number < len(entries):
            raise UserError(f"{what} only the last may lack samples: give their number")
        if entry.samples is not None and entry.samples < 1:
            raise UserError(f"{what} {entry.samples} samples must be at least 1")
        blend = parse_entries(entry.data, f"{PHASES} {path}, {name}:")
        phases.append(DataPhase(name=name, samples=entry.samples, blend=blend))
    return tuple(phases)


def starts_of(phases: Sequence[DataPhase]) -> list[int]:
    """Return the number of samples of the training before each phase."""
    return [*accumulate((phase.samples or 0 for phase in phases[:-1]), initial=0)][: len(phases)]


def parse_entries(content: str | list[Any], flag: str) -> Blend:
    """Parse a blend of a JSON file: words, or a list of weights and paths that may be nested."""
    words = content.split() if isinstance(content, str) else _flatten(content, flag)
    return parse_blend(words, flag)


def _flatten(content: list[Any], flag: str) -> list[str]:
    """Return the words of a list in which nested lists may replace paths."""
    words: list[str] = []
    for place, entry in enumerate(content):
        if not isinstance(entry, list):
            if isinstance(entry, bool) or not isinstance(entry, str | int | float):
                raise UserError(f"{flag} {json.dumps(entry)} is neither a path nor a weight")
            words.append(str(entry))
            continue
        inner = parse_blend(_flatten(entry, flag), flag)
        outer = number_in(str(content[place - 1])) if place % 2 == 1 else None
        if (outer is None) != (inner.weights is None):
            raise UserError(
                f"{flag} a list inside a list has weights where the outer one has none, or none "
                "where it has: give weights in both, or in neither"
            )
        if outer is None:
            words += inner.prefixes
            continue
        words.pop()  # remove the weight that the inner weights divide
        for share, prefix in zip(inner.shares(), inner.prefixes, strict=True):
            words += [repr(outer * share), prefix]
    return words


def _checked(flag: str, prefixes: list[str], weights: list[float] | None) -> Blend:
    """Return the blend without corpora of weight 0."""
    if weights is not None:
        wrong = next((w for w in weights if not 0.0 <= w < math.inf), None)
        if wrong is not None:
            raise UserError(f"{flag} the weight {wrong:g} is no share: give 0 or a number above")
        if not any(weights):
            raise UserError(f"{flag} all weights are 0: give one of the paths more")
        prefixes = [p for p, weight in zip(prefixes, weights, strict=True) if weight > 0.0]
        weights = [weight for weight in weights if weight > 0.0]
        if min(weights) / sum(weights) == 0.0:  # the sum may be infinite
            raise UserError(f"{flag} the weights are too far apart, or too large: give others")
    if not all(map(is_word, prefixes)):
        raise UserError(f"{flag} a path holds a zero byte or half of a character")
    if any(len(prefix) > _MAX_PATH_CHARS for prefix in prefixes):
        raise UserError(f"{flag} a path has more than {_MAX_PATH_CHARS:,} characters")
    if len(prefixes) > MAX_CORPORA:
        raise UserError(f"{flag} {len(prefixes)} corpora are more than {MAX_CORPORA}: merge some")
    return Blend(
        flag=flag, prefixes=tuple(prefixes), weights=None if weights is None else tuple(weights)
    )


def number_in(word: str) -> float | None:
    """Return the word as a number; None if the word is not a number."""
    try:
        return float(word)
    except ValueError:
        return None
