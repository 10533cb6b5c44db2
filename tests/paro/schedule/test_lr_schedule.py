"""Every learning rate curve is Megatron's."""

import math
import warnings
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from paro.schedule.lr_schedule import DECAY_STYLES, WSD_DECAY_STYLES, ScheduleConfig
from tests.helpers.refusals import refused

# 100 samples of warm-up, decay from there to sample 1100 (1000 samples), lr 1.0 down to 0.1.
BASE: dict[str, Any] = {
    "lr": 1.0,
    "min_lr": 0.1,
    "lr_decay_samples": 1100,
    "lr_warmup_samples": 100,
}


def make(**changes: Any) -> ScheduleConfig:
    return ScheduleConfig(**(BASE | changes))


def megatrons(config: ScheduleConfig) -> Any:
    """The scheduler of megatron-core, whose importing warns about missing packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_samples,
        lr_decay_steps=config.lr_decay_samples,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=config.weight_decay_incr_samples,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_samples,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


GROWS = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_samples": 1000}
CURVES: list[dict[str, Any]] = [
    *({"lr_decay_style": style} for style in DECAY_STYLES if style != "WSD"),
    {"lr_decay_style": "inverse-square-root", "min_lr": 0.4},
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": tail, "lr_wsd_decay_samples": 400}
        for tail in WSD_DECAY_STYLES
    ),
    *({"weight_decay_incr_style": style, **GROWS} for style in ("linear", "cosine")),
]


@pytest.mark.slow("imports megatron-core")
def test_rates_and_weight_decays_are_megatrons() -> None:
    for curve, warmup in product(CURVES, ({"lr_warmup_samples": 0}, {"lr_warmup_init": 0.2}, {})):
        schedule = make(**curve, **warmup)
        reference = megatrons(schedule)
        decoupled = make(**curve, **warmup, decoupled_lr=0.5, decoupled_min_lr=0.3)
        for reference.num_steps in (*range(0, 1200, 10), 101, 701, 1001, 1101, 10**6):
            at = reference.num_steps
            wanted = pytest.approx([reference.get_lr({}), reference.get_wd()], rel=1e-12, abs=1e-17)
            assert [schedule.lr_at(at), schedule.weight_decay_at(at)] == wanted, schedule
            of_group = reference.get_lr({"max_lr": 0.5, "min_lr": 0.3})
            assert decoupled.decoupled_lr_at(at) == pytest.approx(of_group, rel=1e-12), schedule
            assert (decoupled.lr_at(at), schedule.decoupled_lr_at(at)) == (schedule.lr_at(at), None)


def test_a_tail_of_wsd_is_no_decay_of_its_own_name() -> None:
    for style in {*WSD_DECAY_STYLES} - {*DECAY_STYLES}:
        with pytest.raises(KeyError):
            make(lr_decay_style=style).lr_at(600)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lr": math.nan}, "--lr nan"),
        ({"min_lr": -0.1}, "--min-lr -0.1"),
        ({"decoupled_lr": 0.05}, "--decoupled-lr 0.05 ... --min-lr"),
        ({"decoupled_lr": 1.0, "decoupled_min_lr": 2.0}, "--decoupled-lr 1.0 ... 2.0"),
        ({"decoupled_min_lr": 0.0}, "--decoupled-min-lr 0.0 needs --decoupled-lr"),
        ({"lr_warmup_init": 1.5}, "--lr-warmup-init 1.5"),
        ({"lr_warmup_samples": 1100}, "--lr-warmup-iters"),
        ({"lr_decay_samples": 0}, "--lr-decay-iters"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 1200}, "1200 ... --lr-wsd-decay-iters"),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.1}, "--start-weight-decay"),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.1}, "--weight-decay-incr-style"),
    ],
)
def test_contradictions_name_their_flag(changes: dict[str, Any], part: str) -> None:
    refused(lambda: make(**changes), part)
