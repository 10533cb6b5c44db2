"""Compares trainings: a difference as a share of the largest that passes."""

# [Note: the scale of a difference]
# Sums in another order change a gradient by less than a millionth of its size, and how far a
# parameter moves by as much. That distance is short compared with the parameter, whose own size
# would hide a wrong step: a difference is measured against the distance, and against the rounding
# of the parameter. AdamW divides a gradient that is nothing but rounding by its own size and takes
# a full step; trainings that are compared have an epsilon above such gradients (ADAM_EPS).

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.helpers.margins import Margin, margin_of, note
from tests.helpers.training import Trained

ADAM_EPS = "--adam-eps 1e-4"  # the gradients of the models that are compared are around 1e-3


@dataclass(frozen=True, slots=True)
class Allowed:
    """How much two trainings that compute the same may differ."""

    movement: float  # as a share of the distance that a parameter moves, in norm
    scalar: float  # as a share of a loss or gradient norm


FP32 = Allowed(movement=1e-4, scalar=5e-6)
BF16 = Allowed(movement=0.06, scalar=0.005)
BF16_MUON = Allowed(movement=0.3, scalar=0.01)  # small singular values grow several hundredfold


def margin_between(trained: Trained, reference: Trained, allowed: Allowed, label: str) -> Margin:
    """Returns the largest difference of losses, norms and parameters, in what is allowed."""
    margins = []
    for number, (step, wanted) in enumerate(zip(trained.steps, reference.steps, strict=True)):
        for name in ("loss", "grad_norm"):
            value, want = getattr(step, name), getattr(wanted, name)
            limit = allowed.scalar * abs(want)
            margins.append(margin_of(value, want, limit, f"{label}: {name} of step {number}"))
    assert trained.parameters.keys() == reference.parameters.keys()
    rounding = torch.finfo(torch.float32).eps * len(reference.steps)
    for name, value in reference.parameters.items():
        limit = allowed.movement * reference.movements[name] + rounding * float(value.norm())
        difference = float((trained.parameters[name] - value).norm())
        margins.append(margin_of(difference, 0.0, limit, f"{label}: {name}"))
    return max(margins)


def assert_same(trained: Trained, reference: Trained, label: str, allowed: Allowed = FP32) -> None:
    """Fails if losses, norms or parameters of two trainings differ by more than is allowed."""
    note(margin_between(trained, reference, allowed, label))
