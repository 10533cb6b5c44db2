"""Training of adapters equals peft's and transformers', step by step; peft opens our folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from model.lora_config import is_adapter
from paro.checkpoint.convert.peft import peft_name
from paro.training.assembly import build_data, build_sources, start_state
from paro.training.step import train_step
from tests.helpers.training import save_run, whole_parameters
from tests.paro.checkpoint.convert.folders import logits_of, some_tokens
from tests.paro.training.test_base import started, trained
from tools.convert_checkpoint import main as convert

pytestmark = pytest.mark.verify  # importing peft takes seconds
STEPS = 20
FLAGS = f"--adam-eps 1e-6 --global-batch-size 4 --micro-batch-size 2 --train-iters {STEPS}"


def to(kind: str, source: Path, target: Path) -> Path:
    convert(["--from", "paro", "--to", kind, "--input", str(source), "--output", str(target)])
    return target


def loss_of(model: Any, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    logits_BSV = model(input_ids=tokens_BS).logits
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


@pytest.mark.parametrize("modules", ["q_proj,v_proj", "all-linear"])
def test_twenty_steps_are_those_of_peft(tmp_path: Path, modules: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained(f"--save {tmp_path / 'base'}")
    lora = f"--lora-rank 4 --lora-alpha 12 --lora-target-modules {modules}"
    begin = f"{FLAGS} {lora} --load {tmp_path / 'base'} --save {tmp_path / 'run'}"
    config, training, resumed = started(begin)
    save_run(config, training, resumed)
    base = AutoModelForCausalLM.from_pretrained(to("hf", tmp_path / "base", tmp_path / "hf"))
    folder = to("peft", tmp_path / "run", tmp_path / "peft")
    theirs = PeftModel.from_pretrained(base, folder, is_trainable=True)
    names = {name: peft_name(name) for name in whole_parameters(training) if is_adapter(name)}
    weights = {n.replace(".default", ""): p for n, p in theirs.named_parameters()}
    assert {n for n, p in weights.items() if p.requires_grad} == set(names.values())

    optim = config.optim
    adamw = torch.optim.AdamW(
        [weights[name] for name in names.values()],
        lr=0.002,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=1e-6,
        weight_decay=0.1,
    )
    data = build_data(config)
    ours = build_sources(config, data, training, start_state(config)).train
    batches = build_sources(config, data, training, start_state(config)).train
    state = start_state(config)
    for _ in range(STEPS):
        step = train_step(training, state, ours)
        losses = []
        for _ in range(2):
            batch = next(batches)
            loss = loss_of(theirs, batch.tokens_BS, batch.labels_BS) / 2
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), optim.clip_grad)
        adamw.step()
        adamw.zero_grad()
        assert step.loss == pytest.approx(sum(losses), rel=1e-5)
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)
    values = whole_parameters(training)
    for name, their_name in names.items():
        error = torch.linalg.vector_norm(values[name] - weights[their_name].detach())
        assert error <= 3e-5 * torch.linalg.vector_norm(values[name]), name
        assert name.endswith("_lora_a") or values[name].abs().max() > 1e-3


def test_peft_opens_what_was_trained(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained(f"--save {tmp_path / 'base'}")
    lora = "--lora-rank 4 --lora-target-modules all-linear --lr 0.05"
    trained(f"{lora} --load {tmp_path / 'base'} --save {tmp_path / 'run'}")
    base = AutoModelForCausalLM.from_pretrained(to("hf", tmp_path / "base", tmp_path / "hf"))
    adapted = PeftModel.from_pretrained(base, to("peft", tmp_path / "run", tmp_path / "peft"))
    words = ["--from", "paro", "--to", "hf", "--input", str(tmp_path / "run"), "--merge"]
    convert([*words, "--output", str(tmp_path / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens_BS = some_tokens(60, length=12)
    torch.testing.assert_close(logits_of(adapted, tokens_BS), logits_of(merged, tokens_BS))
    with adapted.disable_adapter():
        plain = logits_of(adapted, tokens_BS)
    assert (plain - logits_of(merged, tokens_BS)).abs().max() > 1e-3
