"""Megatron-core's GPT model on gloo ranks without a GPU, and the checkpoints that it writes."""

from __future__ import annotations

import queue
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.config import LlamaConfig
from paro.checkpoint.convert.megatron_names import written_args
from tests.paro.checkpoint.convert.folders import some_tokens

ITERATION = "iter_0000003"
LR = 0.01
STEPS_AFTER = 5  # steps after the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model and the ranks that hold it; the rest of the ranks are replicas."""

    name: str
    model: str  # the name of its folder
    config: LlamaConfig
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None  # chunks of layers on each pipeline stage
    first: int | None = None  # layers of the first pipeline stage, if it has other than the rest
    metadata: dict[str, Any] = field(default_factory=dict)  # of Megatron-core's sharded state


class OnCpu(TorchFunctionMode):
    """Tensors that are to be made on a GPU, or copied to it, are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        made = func(*args, **given)
        # Its optimizers ask for the name of the type.
        asks = func is Tensor.type and isinstance(made, str)
        return made.replace("torch.", "torch.cuda.") if asks else made


@contextmanager
def megatron_without_cuda() -> Iterator[None]:
    """Megatron-core without what asks for a GPU: tensors' device, synchronization, random states.

    No dropout draws from the random states.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        with (
            OnCpu(),
            mock.patch("torch.cuda.synchronize"),
            mock.patch("torch.cuda.current_device", return_value="cpu"),
            mock.patch.object(CudaRNGStatesTracker, "fork", return_value=nullcontext()),
            # Else another process, which imports everything, passes results to this one.
            mock.patch.object(filesystem_async, "_results_queue", queue.Queue()),
        ):
            yield


def gpt_chunks(layout: Layout, *, rows: int) -> list[Any]:
    """Make this rank's chunks of Megatron-core's GPT; its process groups exist."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, layout.virtual)
    config = layout.config
    equal = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
        *("num_query_groups", "kv_channels", "add_qkv_bias", "qk_layernorm"),
    )
    theirs = TransformerConfig(
        **{name: getattr(config, name) for name in equal},
        layernorm_epsilon=config.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        num_layers_in_first_pipeline_stage=layout.first,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    chunks = []
    for chunk in range(layout.virtual or 1):
        stage = {"vp_stage": chunk if layout.virtual else None, "ignore_virtual": False}
        model = GPTModel(
            theirs,
            spec,
            vocab_size=rows,
            max_sequence_length=config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=config.tie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=int(config.rotary_base),
            rope_scaling=config.use_rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            vp_stage=stage["vp_stage"],
        )
        chunks.append(model)
    return chunks


def copy_checkpoints(
    layouts: Sequence[Layout], written: Path, copies: Path, rows: int
) -> dict[str, Tensor]:
    """Loads a checkpoint for each layout and saves it again in the formats torch_dist and torch.

    Each is read from the folder of its model in `written`. Return the logits of whole models.
    """
    logits = {}
    with megatron_without_cuda():
        from megatron.core import dist_checkpointing

        for layout in layouts:
            chunks = gpt_chunks(layout, rows=rows)
            wanted = _by_chunk([chunk.sharded_state_dict() for chunk in chunks])
            loaded = dist_checkpointing.load(wanted, str(written / layout.model / "release"))
            for name, chunk in zip(wanted, chunks, strict=True):
                chunk.load_state_dict(loaded[name])
            args = loaded["args"]
            args.tensor_model_parallel_size = layout.tensor
            args.pipeline_model_parallel_size = layout.pipeline
            states = [chunk.sharded_state_dict(metadata=layout.metadata) for chunk in chunks]
            save_states(_by_chunk(states), copies / layout.name / "torch_dist", args)
            save_torch(chunks, copies / layout.name / "torch", args)
            if layout.tensor == layout.pipeline == 1:
                tokens = some_tokens(layout.config.vocab_size)
                positions = torch.arange(tokens.shape[1]).expand_as(tokens)
                with torch.no_grad():
                    logits[layout.name] = chunks[0](tokens, positions, None)
    return logits


FORMS = {  # of the optimizer's states in a checkpoint
    "plain": {},
    "sharded": {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    },
    "by rank": {"distrib_optim_sharding_type": "dp_reshardable"},
}


class Trainer:
    """A whole model on this rank's groups, and Megatron-core's Adam."""

    def __init__(self, layout: Layout, rows: int, *, sharded: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        (self.chunk,) = gpt_chunks(layout, rows=rows)
        flags: Any = {"use_distributed_optimizer": sharded}
        how = DistributedDataParallelConfig(**flags)
        self.model = DistributedDataParallel(self.chunk.config, how, self.chunk)
        rates: Any = {"lr": LR, "weight_decay": 0.1, "clip_grad": 0.0}
        adam = OptimizerConfig(optimizer="adam", **rates, **flags)
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        for group in self.optimizer.param_groups:  # as its scheduler does at every step
            group["weight_decay"] = 0.1 * group["wd_mult"]
        self.tokens = some_tokens(layout.config.vocab_size)

    def step(self) -> float:
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        labels = self.tokens.roll(-1, 1)
        loss: Tensor = self.model(self.tokens, positions, None, labels=labels).mean()
        loss.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        return float(loss)

    def states(self, metadata: dict[str, Any], *, to_load: bool = False) -> dict[str, Any]:
        states = {"model": self.chunk.sharded_state_dict(metadata=metadata)}
        states["optimizer"] = self.optimizer.sharded_state_dict(
            states, is_loading=to_load, metadata=metadata
        )
        return states


def train_and_save(layout: Layout, folder: Path, rows: int) -> list[float]:
    """Trains from one initialization with each form of the optimizer, and saves at step 3.

    Return the losses of the steps after that, which are equal for all forms.
    """
    losses: list[list[float]] = []
    with megatron_without_cuda():
        for form, metadata in FORMS.items():
            torch.manual_seed(5)
            trainer = Trainer(layout, rows, sharded=form != "plain")
            for _ in range(3):
                trainer.step()
            args = written_args(layout.config, layout.config.vocab_size, torch.float32, 128)
            args.consumed_train_samples, args.global_batch_size = 6, 2
            save_states(trainer.states(metadata), folder / form, args)
            losses.append([trainer.step() for _ in range(STEPS_AFTER)])
    torch.testing.assert_close(losses, losses[:1] * len(losses), rtol=1e-5, atol=0)
    return losses[0]


def continue_from(layout: Layout, directory: Path, rows: int, num_steps: int) -> list[float]:
    """The losses of a training that begins with a folder of torch_dist, its optimizer too."""
    with megatron_without_cuda():
        from megatron.core import dist_checkpointing
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        load = DistributedOptimizer.load_parameter_state_from_fully_reshardable

        def load_without_steps(optimizer: Any, states: Any) -> None:
            """Fill the states but the steps of torch's Adam, which all get as one tensor."""
            steps = [(each, each.pop("step")) for each in optimizer.optimizer.state.values()]
            load(optimizer, states)
            for each, step in steps:
                each["step"] = step.clone()

        trainer = Trainer(layout, rows, sharded=True)
        trainer.step()  # without a GPU's Adam its optimizer can only load states that it has
        metadata = dist_checkpointing.load_content_metadata(str(directory))
        states = trainer.states(metadata, to_load=True)
        loaded = dist_checkpointing.load(states, str(directory))
        trainer.chunk.load_state_dict(loaded["model"])
        with mock.patch.object(DistributedOptimizer, load.__name__, load_without_steps):
            trainer.optimizer.load_state_dict(loaded["optimizer"])
        return [trainer.step() for _ in range(num_steps)]


def save_states(states: dict[str, Any], root: Path, args: Namespace) -> None:
    from megatron.core import dist_checkpointing

    directory = _begin(root)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 3}
    dist_checkpointing.save({**common, **states}, str(directory))


def save_torch(chunks: Sequence[Any], root: Path, args: Namespace) -> None:
    """Saves the model as Megatron-LM does with --ckpt-format torch: by the first replica."""
    from megatron.core import parallel_state

    directory = _begin(root)
    if parallel_state.get_data_parallel_rank() == 0:
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        states = _by_chunk([chunk.state_dict_for_save_checkpoint() for chunk in chunks])
        (directory / name).mkdir()
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 3}
        torch.save({**common, **states}, directory / name / "model_optim_rng.pt")
    dist.barrier()


def _by_chunk(states: Sequence[Any]) -> dict[str, Any]:
    """The states of a rank's chunks by the names that Megatron-LM gives them."""
    names = ["model"] if len(states) == 1 else [f"model{index}" for index in range(len(states))]
    return dict(zip(names, states, strict=True))


def _begin(root: Path) -> Path:
    directory = root / ITERATION
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("3")
    dist.barrier()
    return directory
