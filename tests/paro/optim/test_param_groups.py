"""Groups of parameters: their factors, and updates compared with those of torch's groups."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from paro.spec.optim_config import OptimConfig
from paro.spec.param_groups import GroupFactors
from tests.helpers.refusals import refused
from tests.helpers.training import configured
from tests.helpers.triton_kernels import interpreter
from tests.paro.optim.test_muon import DECAY, LR, RUN, gradient, is_muons, trained

NORMS = "--qk-layernorm --apply-wd-to-qk-layernorm"
GROUPS = ("names:*.wq,*.mlp_norm lr-mult=3 wd-mult=0.5", "names:blocks.1.*,head.* lr-mult=0")
FLAGS = f"{NORMS} --param-group {' '.join(GROUPS)}"
MUP = "--use-mup --mup-base-hidden-size 8 --adam-eps 0.02"  # of 20
DECOUPLED = 0.03


def expected(name: str, values: Tensor) -> tuple[float, float]:
    """The learning rate and the weight decay of a parameter under FLAGS."""
    of_end = name in ("embedding.weight", "head.weight")
    lr, decays = DECOUPLED if of_end else LR, values.dim() > 1 or name[-6:] in ("q_norm", "k_norm")
    if name.endswith((".wq", ".mlp_norm")):
        return 3 * lr, 0.5 * DECAY
    return (0.0 if name.startswith(("blocks.1.", "head.")) else lr), DECAY * decays


@pytest.mark.slow("interprets kernels")
@pytest.mark.parametrize("implementation", ["torch", "triton", "torch --exp-avg-dtype bf16"])
def test_updates_are_those_of_torchs_groups(implementation: str) -> None:
    flags = f"{FLAGS} {MUP} --optimizer adam --adam-implementation {implementation}"
    with interpreter() if implementation == "triton" else nullcontext():
        params, found = trained(flags, num_steps=2, decoupled_lr=DECOUPLED)
    groups = [
        {"params": [values], "lr": lr / width, "weight_decay": decay, "eps": 0.02 / width}
        for name, values in params.items()
        for lr, decay in [expected(name, values)]
        for width in [2.5 if is_muons(name, values) else 1.0]
    ]
    optimizer, within = torch.optim.AdamW(groups), 1e-3 if "bf16" in implementation else 1e-6
    for step in range(2):
        for name, values in params.items():
            values.grad = gradient(name, values.shape, step)
        optimizer.step()
    assert any(name.endswith("k_norm") for name in params)
    for name, values in params.items():
        assert torch.allclose(found[name], values, rtol=within, atol=within), name


def test_muon_has_groups_too() -> None:
    """Muon's update is in proportion to the rate, after weight decay."""
    params, plain = trained(NORMS, num_steps=1)
    _, found = trained(FLAGS, num_steps=1, decoupled_lr=DECOUPLED)
    for name, values in params.items():
        if is_muons(name, values):
            lr, decay = expected(name, values)
            update = (plain[name] - (1 - LR * DECAY) * values) / LR
            wanted = (1 - lr * decay) * values + lr * update
            assert torch.allclose(found[name], wanted, rtol=1e-5, atol=1e-6), name


def test_the_first_group_with_a_name_decides() -> None:
    both = OptimConfig(param_group=("names:*.wq lr-mult=2", "names:*w* lr-mult=5", "wd-mult=0"))
    assert both.groups().of("blocks.0.wq", (3, 3)) == GroupFactors(
        2.0, 1.0, 1.0, is_decoupled=False
    )
    assert both.groups().of("head.weight", (3, 3)) == GroupFactors(5.0, 0.0, 1.0, is_decoupled=True)
    assert both.groups().of("head.norm", (3,)) == GroupFactors(1.0, 0.0, 1.0, is_decoupled=False)


def test_mup_divides_rates_and_epsilons_of_matrices_of_blocks_by_the_width() -> None:
    """But for Muon's, as in Megatron."""
    names = {"blocks.0.wq": (3, 3), "blocks.0.q_norm": (3,), "embedding.weight": (3, 3)}
    names |= {"blocks.0.wq_lora_a": (2, 3), "blocks.0.wq_lora_b": (3, 2)}
    for optimizer, wanted in (("adam", [0.4, 1.0, 1.0, 0.4, 1.0]), ("muon", [1.0] * 5)):
        groups = configured(f"{RUN} {MUP} --optimizer {optimizer}").param_groups
        found = [groups.of(name, shape) for name, shape in names.items()]
        assert [(each.lr, each.eps) for each in found] == [(lr, lr) for lr in wanted]
    slower = OptimConfig(param_group=("names:*.wq lr-mult=2",)).groups(width=4.0)
    assert slower.of("blocks.0.wq", (3, 3)) == GroupFactors(0.5, 1.0, 0.25, is_decoupled=False)


def test_what_is_no_group_is_refused() -> None:
    for words in (
        *("*.wq lr-mult=2", "names:*.wq", "names: lr-mult=2", "names:a,,b lr-mult=2"),
        *("names:*.wq lr-mult=-1", "names:*.wq lr-mult=inf", "names:*.wq lr-mult=x"),
        *("names:*.wq lr=2", "names:*.wq lr-mult=2 lr-mult=2", "names:*.wq lr-mult", ""),
    ):
        message = f"--param-group {words!r}", "names:PATTERN[,PATTERN] lr-mult=X wd-mult=X"
        refused(lambda words=words: OptimConfig(param_group=(words,)), *message)
