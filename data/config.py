"""The data flags as a dataclass: which tokens a run reads, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.blend import (
    PHASES,
    Blend,
    DataPhase,
    parse_blend,
    read_blend,
    read_blend_per_split,
    read_phases,
)
from data.sample_order import SPLIT_NAMES, parse_split
from paro.errors import UserError, check_between, contradiction
from paro.files.object_cache import ObjectCache
from paro.files.object_store import is_url

DEFAULT_SPLIT = "969, 30, 1"
MAX_SEED = 2**32 - 1
MOST_TOKENS = 2**31  # largest --seq-length
MOST_WORKERS = 1024  # most worker processes of one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """Effects of the end-of-document token; by default none, as in Megatron."""

    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(DocumentRules):
    """The tokens to train on and the way to read them."""

    seq_length: int
    data_path: tuple[str, ...] = ()
    data_args_path: str | None = None
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    per_split_data_args_path: str | None = None
    data_phases: str | None = None  # file of blends for training alone, one after another
    mock_data: bool = False
    split: str | None = None  # weights that cut shared data into splits; None: DEFAULT_SPLIT
    data_cache_path: str | None = None
    sft: bool = False  # True: a sample is one conversation
    multiple_validation_sets: bool = False
    full_validation: bool = False
    num_workers: int = 2
    seed: int = 1234

    def __post_init__(self) -> None:
        flags = self._sources()
        if len(flags) > 1:
            raise contradiction(flags[0], flags[1])
        if self.data_phases is not None and self.train_data_path:
            raise contradiction(PHASES, "--train-data-path")
        if not flags:
            raise UserError("no data: give --data-path PREFIX, or --mock-data for synthetic tokens")
        blends = self.blends()
        if not (self.mock_data or self.phases() or "train" in blends):
            raise UserError(f"{flags[0]} is given and no training data: give --train-data-path")
        if self.full_validation and self.mock_data:
            raise UserError("--full-validation needs a corpus: --mock-data have no end")
        if self.multiple_validation_sets:
            valid = blends.get("valid")
            if not self.is_per_split or valid is None:
                raise UserError(
                    "--multiple-validation-sets needs --valid-data-path with a path for each"
                )
            if valid.weights is not None:
                raise UserError(
                    f"{valid.flag} has weights and --multiple-validation-sets keeps its corpora "
                    "apart: leave the weights out"
                )
        if self.sft and self.mock_data:
            raise UserError("--sft needs a corpus of conversations: --mock-data have none")
        if self.is_per_split and self.split is not None:
            raise contradiction("--split", flags[0])
        check_between(1, MOST_TOKENS, seq_length=self.seq_length)
        check_between(0, MOST_WORKERS, num_workers=self.num_workers)
        check_between(0, MAX_SEED, seed=self.seed)
        parse_split(self.split or DEFAULT_SPLIT)

    def _sources(self) -> list[str]:
        """Return the flags that name data, of all splits or of each; exactly one must be given."""
        per_split = [f"--{name}-data-path" for name, words in self._words().items() if words]
        if self.data_phases is not None:
            per_split = [PHASES]
        is_given = {
            "--mock-data": self.mock_data,
            "--data-path": bool(self.data_path),
            "--data-args-path": self.data_args_path is not None,
            **dict.fromkeys(per_split[:1], True),
            "--per-split-data-args-path": self.per_split_data_args_path is not None,
        }
        return [flag for flag, given in is_given.items() if given]

    def _words(self) -> dict[str, tuple[str, ...]]:
        return {name: getattr(self, f"{name}_data_path") for name in SPLIT_NAMES}

    @property
    def is_per_split(self) -> bool:
        """True if every split has its own data, instead of a part of shared data."""
        by_split = (self.per_split_data_args_path, self.data_phases, *self._words().values())
        return any(by_split)

    @property
    def split_in_use(self) -> str | None:
        """Weights of train, valid and test data; None if every split has its own data."""
        return None if self.is_per_split else self.split or DEFAULT_SPLIT

    def cache_folder(self, prefix: str) -> Path:
        """Return the folder of indices; Megatron's, next to the data, unless one is given.

        Those of data in an object store are with the blocks of objects.
        """
        if self.data_cache_path is None and is_url(prefix):
            return ObjectCache.folder / "GPTDataset_indices"
        return Path(self.data_cache_path or f"{prefix}/cache/GPTDataset_indices")

    def phases(self) -> tuple[DataPhase, ...]:
        """Return the phases of training data; none where one blend is read from start to end."""
        return () if self.data_phases is None else read_phases(self.data_phases)

    def blends(self) -> dict[str, Blend]:
        """Return the blend of each split, without phases; empty for synthetic tokens."""
        if self.per_split_data_args_path is not None:
            return read_blend_per_split(self.per_split_data_args_path, "--per-split-data-args-path")
        if self.is_per_split:
            words = self._words()
            return {n: parse_blend(words[n], f"--{n}-data-path") for n in words if words[n]}
        if self.data_args_path is not None:
            return dict.fromkeys(SPLIT_NAMES, read_blend(self.data_args_path, "--data-args-path"))
        if self.data_path:
            return dict.fromkeys(SPLIT_NAMES, parse_blend(self.data_path, "--data-path"))
        return {}
