"""Settings of AdamW and Muon, with Megatron's names, defaults and Newton-Schulz coefficients."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from itertools import chain, cycle, islice

from paro.errors import UserError, check_least, check_positive
from paro.spec.param_groups import ParamGroup, ParamGroups

Coefficients = tuple[float, float, float]

_COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "deepseekv4": (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
}
_LAST_REPEATED = ("polar_express", "cans")  # other coefficients repeat as a whole
COEFFICIENT_TYPES = tuple(_COEFFICIENTS)
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW, parameter groups, clipping and averaged weights, with Megatron's names for most."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    adam_implementation: str = "auto"  # or "torch", "triton", "apex"
    param_group: tuple[str, ...] = ()
    apply_wd_to_qk_layernorm: bool = False
    ema_decay: float | None = None  # decay of averaged weights; None: nothing is averaged
    ema_start: int = 0  # first iteration after which weights may be averaged
    ema_interval: int = 1  # iterations between two updates of the average
    eval_ema: bool = False  # True: evaluate averaged weights too

    def __post_init__(self) -> None:
        self.groups()  # raises `UserError` for a value that is no group
        for flag, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            if not 0.0 <= beta < 1.0:
                raise UserError(f"{flag} {beta} must be in [0, 1)")
        check_positive(adam_eps=self.adam_eps)
        if self.clip_grad < 0.0:
            raise UserError(f"--clip-grad {self.clip_grad} is negative; 0 turns clipping off")
        if self.adam_implementation == "apex":
            check_apex()
        check_least(0, ema_start=self.ema_start)
        check_least(1, ema_interval=self.ema_interval)
        if self.ema_decay is None and (self.ema_start, self.ema_interval) != (0, 1):
            raise UserError("--ema-start and --ema-interval need --ema-decay")
        if self.ema_decay is None and self.eval_ema:
            raise UserError("--eval-ema needs --ema-decay, whose averaged weights it evaluates")

    def averages_after(self, iteration: int) -> bool:
        """Return whether the weights after an iteration are to be averaged."""
        since = iteration - self.ema_start
        return self.ema_decay is not None and since >= 0 and since % self.ema_interval == 0

    def average_weight(self, number: int) -> float:
        """Return the weight of parameters in an average of `number`, with bias correction.

        A sum of weights (1 - decay) decay^i is divided by what they add up to, as Adam's moments
        are; the first parameters have weight 1.
        """
        assert self.ema_decay is not None, "nothing is averaged"
        return (1.0 - self.ema_decay) / (1.0 - self.ema_decay**number)

    def groups(self, *, width: float = 1.0, by_muon: bool = False) -> ParamGroups:
        """Return the rule for the factors of every parameter's rate, weight decay and epsilon."""
        return ParamGroups(
            width=width,
            by_muon=by_muon,
            groups=ParamGroup.of_flag(self.param_group),
            decays_qk_norms=self.apply_wd_to_qk_layernorm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Muon's settings, with Megatron's names and defaults."""

    muon_momentum: float = 0.9
    muon_nesterov: bool = False
    muon_num_ns_steps: int = 5
    muon_coefficient_type: str = "quintic"
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_fp32_matmul_prec: str = "medium"

    def __post_init__(self) -> None:
        if not 0.0 <= self.muon_momentum < 1.0:
            raise UserError(f"--muon-momentum {self.muon_momentum} must be in [0, 1)")
        if not 1 <= self.muon_num_ns_steps < 100:
            raise UserError(f"--muon-num-ns-steps {self.muon_num_ns_steps} must be in [1, 100)")
        check_positive(muon_extra_scale_factor=self.muon_extra_scale_factor)

    def coefficients(self) -> tuple[Coefficients, ...]:
        """Return the coefficients of every step of Newton-Schulz."""
        listed = _COEFFICIENTS[self.muon_coefficient_type]
        again = listed[-1:] if self.muon_coefficient_type in _LAST_REPEATED else listed
        return tuple(islice(chain(listed, cycle(again)), self.muon_num_ns_steps))

    def scale(self, rows: int, columns: int) -> float:
        """Return the factor of the orthogonalized update of a matrix of this shape."""
        match self.muon_scale_mode:
            case "spectral":
                scale = math.sqrt(max(rows, columns))
            case "unit_rms_norm":
                scale = math.sqrt(rows / columns)
            case _:
                scale = math.sqrt(max(1.0, rows / columns))
        return scale * self.muon_extra_scale_factor


def check_apex() -> None:
    """Raise `UserError` without NVIDIA's apex and its `amp_C`; PyPI's `apex` is another package."""
    if importlib.util.find_spec("amp_C") is None or importlib.util.find_spec("apex") is None:
        raise UserError(
            "--adam-implementation apex needs NVIDIA's apex with its CUDA extensions "
            "(https://github.com/NVIDIA/apex); leave the flag away for torch's fused AdamW"
        )
