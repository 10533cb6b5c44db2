"""What a run begins with: the state to continue from, and what its checkpoints take over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paro.checkpoint.base import as_base, stored_parameters
from paro.checkpoint.directory import Base, TokenIds, find_checkpoint
from paro.config.run import RunConfig
from paro.training.step import TrainState


class Recovery(NamedTuple):
    """A recovery from local copies: its time, and the bytes of all ranks by their source."""

    seconds: float
    own_node_bytes: int
    other_nodes_bytes: int

    def panel(self) -> dict[str, float]:
        """For dashboards."""
        return {
            "recovery/seconds": self.seconds,
            "recovery/bytes-from-own-nodes": float(self.own_node_bytes),
            "recovery/bytes-from-other-nodes": float(self.other_nodes_bytes),
        }


class Resumed(NamedTuple):
    """What a run begins with."""

    state: TrainState | None = None  # to continue from; None: iteration 0
    base: Base | None = None  # of the checkpoints to save; None: they are complete
    recovery: Recovery | None = None  # None: from --load
    token_ids: TokenIds | None = None  # of the configuration of the model that training began with
    unpadded_vocab_size: int | None = None  # rows of what was loaded; None: nothing was

    def saved_iteration(self, config: RunConfig) -> int | None:
        """The iteration that was loaded from --save, and is not saved again."""
        if self.state is None or self.recovery is not None or not config.checkpoint.continues:
            return None
        return self.state.iteration

    def unpadded_rows(self, config: RunConfig) -> int:
        """The vocabulary rows that are no padding, of the model and not only of its tokenizer.

        Those of what was loaded, else of --padded-vocab-size: --make-vocab-size-divisible-by pads.
        """
        rows = self.unpadded_vocab_size
        if rows is None:
            rows = config.given["padded_vocab_size"] or 0
        return min(max(rows, config.vocab_size), config.model.vocab_size)


FROM_NOTHING = Resumed()


def base_of(config: RunConfig, common: Mapping[str, Any]) -> Base | None:
    """The base of the checkpoints that a run saves after it has loaded one with this common.json.

    The frozen parameters must be in one folder that this run neither writes nor removes; else None.
    """
    flags = config.checkpoint
    saves = flags.save is not None and not config.train.skip_train
    if flags.save_frozen or not saves or not config.trainable.is_part(config.model):
        return None
    assert flags.load is not None, "nothing was loaded"
    directory = find_checkpoint(flags.load, common["iteration"])
    assert directory is not None, "it was loaded"
    named: Base | None = common.get("base")
    if named is None:
        return None if flags.saves_where_it_loads else as_base(directory)
    if not stored_parameters(directory) <= config.trained:
        return None
    folder = named["folder"] if flags.base is None else str(Path(flags.base).resolve())
    return Base(folder=folder, iteration=named["iteration"], checksum=named["checksum"])
