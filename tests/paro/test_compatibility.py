"""Megatron's LLaMA scripts run; what they may not ask for is answered with what to use instead."""

import re

import pytest

from paro.arguments import build_parser, parse_args
from paro.compatibility import RULES, check_compatibility


def test_each_flag_has_one_rule_and_each_rule_says_why() -> None:
    flags = [rule.flag for rule in RULES]
    assert len(set(flags)) == len(flags)
    for rule in RULES:
        can_refuse = rule.accepts is not None and not (rule.takes is None and rule.accepts)
        assert bool(rule.instead) == can_refuse, rule.flag
        assert bool(rule.why) == (rule.accepts != ()), rule.flag


def test_flags_that_are_not_given_leave_no_trace() -> None:
    args = parse_args([])
    assert not {rule.dest for rule in RULES} & vars(args).keys()
    assert check_compatibility(args) == ()


def test_advice_names_flags_that_exist() -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    for rule in RULES:
        assert set(re.findall(r"--[a-z0-9-]+", f"{rule.instead} {rule.why}")) <= known, rule.flag


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.flag)
def test_every_rule_accepts_and_refuses_what_it_says(rule: object) -> None:
    assert isinstance(rule, type(RULES[0]))
    values = [] if rule.takes is None else [str(rule.takes(7))]
    accepted = rule.accepts if rule.accepts is not None else (7,)
    for value in accepted:
        words = [rule.flag] if rule.takes is None else [rule.flag, str(value)]
        notices = check_compatibility(parse_args(words))
        assert len(notices) == rule.notice
        assert all(notice.startswith(" ".join(words)) for notice in notices)
    if rule.instead:
        with pytest.raises(ValueError, match=re.escape(" ".join([rule.flag, *values]))) as error:
            check_compatibility(parse_args([rule.flag, *values]))
        assert "{" not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--tensor-model-parallel-size 8", "--paro-strategy GGG, or IIG with --paro-group-size 8"),
        (
            "--pipeline-model-parallel-size 4",
            "or IIG with --paro-group-size 4",
        ),
        ("--context-parallel-size 2", "--recompute-granularity full"),
        ("--sequence-parallel", "--recompute-activations"),
        ("--fp8-format hybrid", "--bf16"),
        ("--attention-dropout 0.1", "without dropout"),
        ("--normalization LayerNorm", "RMSNorm"),
        ("--position-embedding-type learned_absolute", "rope"),
        ("--use-torch-fsdp2", "--paro-strategy GGG"),
        ("--num-distributed-optimizer-instances 4", "NNI"),
        ("--ckpt-format torch", "torch_dcp"),
    ],
)
def test_a_refusal_names_the_setting_that_fits(words: str, advice: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        check_compatibility(parse_args(words.split()))
    assert advice in str(error.value)
