"""Training of adapters equals peft's and transformers', step by step; peft opens our folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from model.config import is_adapter
from paro.checkpoint.convert.peft import peft_name
from paro.training.assembly import build_data, build_sources
from paro.training.step import TrainState, train_step
from tests.helpers.margins import assert_near, margin_of, note
from tests.helpers.training import ADAM_EPS, FP32, save_run, whole_parameters
from tests.paro.checkpoint.convert.folders import logits_of, some_tokens
from tests.paro.training.test_base import started, trained
from tests.tools.conftest import convert

pytestmark = pytest.mark.verify  # importing peft takes seconds
STEPS = 20
FLAGS = f"{ADAM_EPS} --global-batch-size 4 --micro-batch-size 2 --train-iters {STEPS}"


@pytest.mark.parametrize("modules", ["q_proj,v_proj", "all-linear"])
def test_twenty_steps_are_those_of_peft(tmp_path: Path, modules: str) -> None:
    """Compares with a loop of transformers and peft."""
    from peft import PeftModel

    trained(f"--save {tmp_path / 'base'}")
    lora = f"--lora-rank 4 --lora-alpha 12 --lora-target-modules {modules}"
    begin = f"{FLAGS} {lora} --load {tmp_path / 'base'} --save {tmp_path / 'run'}"
    config, training, resumed = started(begin)
    save_run(config, training, resumed)
    base = opened(convert("paro", "hf", tmp_path / "base", tmp_path / "hf"))
    folder = convert("paro", "peft", tmp_path / "run", tmp_path / "peft")
    theirs = PeftModel.from_pretrained(base, folder, is_trainable=True)
    names = {name: peft_name(name) for name in whole_parameters(training) if is_adapter(name)}
    weights = {n.replace(".default", ""): p for n, p in theirs.named_parameters()}
    assert {n for n, p in weights.items() if p.requires_grad} == set(names.values())

    optim = config.optim
    adamw = torch.optim.AdamW(
        [weights[name] for name in names.values()],
        lr=0.002,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
        weight_decay=0.1,
    )
    data, state = build_data(config), TrainState.at_start(config.loss_scale)
    ours, batches = (
        build_sources(config, data, training, TrainState.at_start(config.loss_scale)).train
        for _ in range(2)
    )
    start = whole_parameters(training)
    for _ in range(STEPS):
        step = train_step(training, state, ours)
        losses = []
        for batch in (next(batches), next(batches)):
            logits_BSV = theirs(input_ids=batch.tokens_BS).logits.float()
            losses.append(F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten()))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), optim.clip_grad)
        adamw.step()
        adamw.zero_grad()
        found, wanted = (step.loss, step.grad_norm), (loss.item(), float(norm))
        assert_near(found, wanted, FP32.scalar, "loss and norm of peft's training")
    values = whole_parameters(training)
    for name, their_name in names.items():
        difference = (values[name] - weights[their_name].detach()).norm()
        allowed = FP32.movement * float((values[name] - start[name]).norm())
        note(margin_of(float(difference), 0.0, allowed, name))
        assert name.endswith("_lora_a") or values[name].abs().max() > 1e-3


LAYER = "model.layers.0.self_attn"
QV = ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*layers\.[02]\..*(q|up)_proj"},
        {"target_modules": [f"{LAYER}.q_proj", "1.mlp.up_proj"]},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"target_modules": QV, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}},
        {"target_modules": QV, "alpha_pattern": {f"^{LAYER}.q_proj": 32, "0.self_attn.v_proj": 3}},
        {"target_modules": QV, "init_lora_weights": "gaussian"},
        {"target_modules": QV, "init_lora_weights": False},
    ],
)
def test_what_peft_saves_merges_as_peft_opens_it(tmp_path: Path, config: dict[str, Any]) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    trained(f"--save {tmp_path / 'base'}")
    base = convert("paro", "hf", tmp_path / "base", tmp_path / "hf")
    folder = tmp_path / "adapters"
    adapted = get_peft_model(opened(base), LoraConfig(r=4, task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)
    wanted = PeftModel.from_pretrained(opened(base), folder)
    tokens_BS = some_tokens(60, length=12)
    merge = ("--merge", "--base", base)
    merged = opened(convert("peft", "hf", folder, tmp_path / "merged", *merge))
    found = logits_of(merged, tokens_BS)
    torch.testing.assert_close(found, logits_of(wanted, tokens_BS), rtol=1e-4, atol=1e-4)
    with wanted.disable_adapter():
        assert (found - logits_of(wanted, tokens_BS)).abs().max() > 1e-2


def opened(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
