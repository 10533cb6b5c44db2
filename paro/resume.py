"""What of a run a checkpoint keeps beside the shards, and how a run starts from one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paro.checkpoint.load import Loading, load_checkpoint
from paro.checkpoint.save import save_checkpoint
from paro.config import RunConfig
from paro.optim.loss_scale import LossScaleState
from paro.report.log import Log
from paro.runtime import user_mistakes
from paro.training import Training, TrainState

# What may differ between the run that saved and the one that loads.
_FREE_MODEL_FIELDS = ("recompute", "max_position_embeddings", "init_method_std")


def save_run(config: RunConfig, training: Training, state: TrainState, log: Log) -> None:
    """Saves the run under --save; collective."""
    assert config.checkpoint.save is not None, "nowhere to save"
    common = {
        "model": _model_fields(config),
        "max_position_embeddings": config.model.max_position_embeddings,
        "init_method_std": config.model.init_method_std,
        "tokenizer": asdict(config.tokenizer),
        "vocab_size": config.vocab_size,
        "state": asdict(state),
        "num_optimizer_steps": training.optimizer.num_steps,
        "strategy": config.strategy.name,
        "world_size": training.control.world.size,
    }
    with training.traffic.paused(), user_mistakes():  # a full disk, say, on which all ranks agree
        save_checkpoint(
            config.checkpoint.save,
            state.iteration,
            training.optimizer.flat_shards(),
            common,
            log=log.log0,
        )


def load_run(config: RunConfig, training: Training, log: Log) -> TrainState | None:
    """Fills the run from --load and says where it goes on; None if it starts at the beginning."""
    assert config.checkpoint.load is not None, "nothing to load"
    common = load_checkpoint(
        config.checkpoint.load,
        training.optimizer.flat_shards(),
        wanted=Loading(model=_model_fields(config)),
        log=log.log0,
    )
    if common is None:
        log.log0(f"--load {config.checkpoint.load} holds no checkpoint: starting afresh")
        return None
    with training.traffic.paused():
        training.optimizer.loaded(num_steps=common.get("num_optimizer_steps", 0))
    if common.get("parameters_only"):
        log.log0(f"--load {config.checkpoint.load} is a converted model: training begins with it")
        return None
    saved: dict[str, Any] = common["state"]
    return TrainState(**(saved | {"loss_scale": LossScaleState(**saved["loss_scale"])}))


def _model_fields(config: RunConfig) -> dict[str, Any]:
    fields = asdict(config.model)
    return {name: fields[name] for name in fields if name not in _FREE_MODEL_FIELDS}
