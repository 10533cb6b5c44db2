"""Which parameters train: all, the last blocks, those of some names, or the model's adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from model.config import LlamaConfig, is_adapter
from model.units import parameter_shapes, unit_specs
from paro.errors import UserError

FLAG = "--trainable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """The choice of trainable parameters: a share of the blocks, name patterns, or all."""

    share: float | None = None  # of the blocks, counted from the end; at least one trains
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(f"{FLAG} share {self.share} must be above 0 and at most 1")

    def __str__(self) -> str:
        """Format the value of the flag."""
        if self.patterns:
            return f"names:{','.join(self.patterns)}"
        return "all" if self.share is None else f"last-blocks:{self.share:g}"

    @classmethod
    def of_flag(cls, text: str) -> Trainable:
        """Return the value of --trainable."""
        kind, _, rest = text.partition(":")
        if text == "all":
            return cls()
        patterns = tuple(rest.split(","))
        if kind == "names" and all(patterns):
            return cls(patterns=patterns)
        if kind == "last-blocks":
            with suppress(ValueError):
                return cls(share=float(rest))
        raise UserError(
            f"{FLAG} {text!r} is none of all, last-blocks:SHARE, names:PATTERN[,PATTERN], with a "
            "share above 0 and at most 1"
        )

    def is_part(self, config: LlamaConfig) -> bool:
        """Return whether some parameters of the model are frozen."""
        return self != Trainable() or config.lora is not None

    def names(self, config: LlamaConfig) -> frozenset[str]:
        """Return the names of trainable parameters; `UserError` if a pattern matches none.

        In a model with adapters, the adapters train.
        """
        names = list(parameter_shapes(config))
        if config.lora is not None:
            return frozenset(filter(is_adapter, names))
        if self.share is not None:
            _, *blocks, _ = unit_specs(config)
            trained = blocks[-max(1, round(self.share * config.num_layers)) :]
            return frozenset(name for block in trained for name in block.parameters)
        return frozenset(matching(FLAG, self.patterns or ("*",), names))


def matching(flag: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the parameter names that match a flag's patterns; `UserError` for one without any."""
    for pattern in patterns:
        if not any(found := [name for name in names if fnmatchcase(name, pattern)]):
            # With `blocks.*.NAME` for a parameter of all blocks.
            kinds = dict.fromkeys(re.sub(r"^blocks\.\d+", "blocks.*", name) for name in names)
            raise UserError(
                f"{flag} names: no parameter matches {pattern!r}; the names of this model are "
                f"those of {', '.join(kinds)}"
            )
        yield from found
