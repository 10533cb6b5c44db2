"""The factors of every parameter's learning rate, weight decay and epsilon, by name and shape."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from model.config import up_name
from paro.errors import UserError
from paro.layout import Shape, UnitLayout
from paro.spec.states import is_for_muon

FLAG = "--param-group"
_QK_NORMS = (".q_norm", ".k_norm")


class GroupFactors(NamedTuple):
    """The factors of a parameter's learning rate, weight decay and epsilon, and its rate's kind."""

    lr: float
    weight_decay: float
    eps: float
    is_decoupled: bool  # True: the rate is that of embedding and output layer (--decoupled-lr)

    def __str__(self) -> str:
        decoupled = "decoupled " * self.is_decoupled
        factors = f"learning rate x {self.lr:g}, weight decay x {self.weight_decay:g}"
        return decoupled + factors + (f", epsilon x {self.eps:g}" if self.eps != 1.0 else "")


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A value of --param-group: patterns of parameter names, with factors for these parameters."""

    patterns: tuple[str, ...]
    lr_mult: float = 1.0
    wd_mult: float | None = None  # None: the factor that the parameter has without the group

    @classmethod
    def of_flag(cls, words: Sequence[str]) -> tuple[ParamGroup, ...]:
        """Return the groups of the flag's words; quotes may join the words of a group."""
        texts = re.split(r"\s+(?=names:)", " ".join(words)) if words else []
        return tuple(map(cls._of_text, texts))

    @classmethod
    def _of_text(cls, text: str) -> ParamGroup:
        names, *factors = text.split() or [""]
        kind, _, rest = names.partition(":")
        patterns = tuple(rest.split(","))
        values = dict(each.partition("=")[::2] for each in factors)
        is_known = values.keys() <= {"lr-mult", "wd-mult"} and len(factors) == len(values) > 0
        with suppress(ValueError):
            mults = {key.replace("-", "_"): float(value) for key, value in values.items()}
            is_finite = all(0.0 <= mult < math.inf for mult in mults.values())
            if kind == "names" and all(patterns) and is_known and is_finite:
                return cls(patterns, **mults)
        raise UserError(
            f"{FLAG} {text!r} is none of the form 'names:PATTERN[,PATTERN] lr-mult=X wd-mult=X', "
            "with one of the factors or both, each once and at least 0"
        )

    def has(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroups:
    """The rule for the factors of a parameter: of several groups the first that has its name."""

    groups: tuple[ParamGroup, ...] = ()
    decays_qk_norms: bool = False
    width: float = 1.0  # muP's: `is_divided` has learning rate and epsilon divided by it
    by_muon: bool = False  # whether Muon updates matrices of blocks, which muP then leaves alone

    def of(self, name: str, shape: Shape) -> GroupFactors:
        """Return the factors of a parameter; as in Megatron, norms and biases do not decay."""
        decays = len(shape) > 1 or (self.decays_qk_norms and name.endswith(_QK_NORMS))
        of_width = 1.0 / self.width if self.is_divided(name, shape) else 1.0
        lr, weight_decay = of_width, float(decays)
        group = next((each for each in self.groups if each.has(name)), None)
        if group is not None:
            lr *= group.lr_mult
            weight_decay = weight_decay if group.wd_mult is None else group.wd_mult
        return GroupFactors(lr, weight_decay, of_width, name in ("embedding.weight", "head.weight"))

    def is_divided(self, name: str, shape: Shape) -> bool:
        """Say whether muP divides a parameter's rate by the width: its inputs grow with it.

        Inputs of an adapter's second matrix are its rank, so it has the rate of an embedding
        (LoRA+, arXiv 2402.12354).
        """
        is_from_rank = name.endswith(up_name(""))
        return is_for_muon(name, shape) and not (self.by_muon or is_from_rank)

    def runs(
        self, layout: UnitLayout, start: int, stop: int
    ) -> Iterator[tuple[int, int, GroupFactors]]:
        """Yield (begin, end, factors) of the ranges within [start, stop) with equal factors.

        Padding between them is in a range, and that behind norms and biases.
        """
        run: tuple[int, GroupFactors] | None = None
        for at in layout.chunk_ranges(start, stop):
            factors = self.of(at.chunk.name, at.chunk.shape)
            if run is not None and run[1] != factors:
                yield run[0], at.offset, run[1]
                run = None
            run = run or (at.offset, factors)
        if run is not None:
            matrix_stop = layout.matrix_stop_of(start)
            yield run[0], min(stop, matrix_stop) if at.offset < matrix_stop else stop, run[1]


BY_SHAPE = ParamGroups()
