"""Megatron's flags beside ours: accepted where they name what happens anyway, else refused."""

# So a LLaMA script for Megatron-LM without tensor, pipeline or context parallelism runs unchanged,
# and one that asks for something else is told which setting of PaRO fits the same model.

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One flag. `takes` None is a switch; `accepts` None takes any value.

    `why` says, as help, why accepted values change nothing; `instead` what to do with others.
    Where the accepted flag asked for something that does not happen, `notice` is True and the
    start of the run says so.
    """

    flag: str
    takes: type | None
    accepts: tuple[object, ...] | None
    why: str = ""
    instead: str = ""
    notice: bool = False

    @property
    def dest(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


def _switch(flag: str, why: str) -> Rule:
    """A switch for what is always on."""
    return Rule(flag, None, (True,), why)


def _unheard(flag: str, why: str, takes: type | None = None) -> Rule:
    """A flag that changes no result and is not acted upon."""
    return Rule(flag, takes, None, why, notice=True)


def _refused(flag: str, instead: str, takes: type | None = None) -> Rule:
    return Rule(flag, takes, (), instead=instead)


_SHARD = (
    "give --paro-strategy GGG, or IIG with --paro-group-size {value}, which spread the parameters "
    "over at least as many ranks"
)
_FIT_LONG = (
    "to fit long sequences give --recompute-granularity full, and --paro-strategy GGG to free "
    "memory for activations"
)
_NO_FP8 = "give --bf16; where memory was the reason, --paro-strategy GGG and --grad-reduce-in-bf16"
_ONE_LR = "one learning rate serves all parameters: leave it out"
_KERNEL = "scaled-dot-product attention chooses its kernel by itself"

RULES = (
    # What a LLaMA is.
    _switch("--swiglu", "the MLP is SwiGLU"),
    _switch("--disable-bias-linear", "linear layers have no bias"),
    _switch("--use-rotary-position-embeddings", "positions are rotary"),
    _switch("--no-position-embedding", "positions are rotary, none is learned"),
    _switch("--apply-layernorm-1p", "a norm's weight starts at 1 and is not decayed either way"),
    Rule(
        "--normalization",
        str,
        ("RMSNorm", "rmsnorm"),
        "norms are RMSNorm",
        "LLaMA's norm is RMSNorm",
    ),
    Rule(
        "--position-embedding-type",
        str,
        ("rope",),
        "positions are rotary",
        "LLaMA's positions are rotary: give rope",
    ),
    Rule(
        "--rotary-percent",
        float,
        (1.0,),
        "heads are rotated whole",
        "LLaMA rotates whole heads: give 1.0",
    ),
    Rule(
        "--attention-dropout",
        float,
        (0.0,),
        "there is no dropout",
        "LLaMA trains without dropout: give 0",
    ),
    Rule(
        "--hidden-dropout",
        float,
        (0.0,),
        "there is no dropout",
        "LLaMA trains without dropout: give 0",
    ),
    _refused("--num-experts", "LLaMA is dense: leave it out", int),
    _refused(
        "--rotary-seq-len-interpolation-factor",
        "positions are not interpolated; --use-rope-scaling stretches as LLaMA-3.1 does",
        int,
    ),
    # How it is computed.
    _switch("--use-mcore-models", "there is one implementation"),
    Rule(
        "--transformer-impl",
        str,
        ("local", "transformer_engine"),
        "there is one implementation",
        "give local or transformer_engine; both mean the one implementation",
    ),
    _switch("--use-flash-attn", _KERNEL),
    Rule(
        "--attention-backend",
        str,
        ("auto", "flash", "fused", "unfused", "local"),
        _KERNEL,
        "give auto",
    ),
    _switch("--attention-softmax-in-fp32", "softmax accumulates in fp32"),
    _switch("--cross-entropy-loss-fusion", "cross-entropy runs in chunks of tokens"),
    _switch("--no-masked-softmax-fusion", "there is no fused softmax to turn off"),
    _switch("--no-bias-swiglu-fusion", "there is no such fusion to turn off"),
    _switch("--no-bias-dropout-fusion", "there is no such fusion to turn off"),
    _switch("--no-bias-gelu-fusion", "there is no such fusion to turn off"),
    _switch("--no-rope-fusion", "there is no such fusion to turn off"),
    _switch("--no-persist-layer-norm", "there is no such kernel to turn off"),
    _switch("--no-query-key-layer-scaling", "queries are not scaled by layer"),
    _switch("--no-gradient-accumulation-fusion", "gradients are accumulated by the unit"),
    _switch("--use-cpu-initialization", "initial values are made on the CPU"),
    _switch("--init-model-with-meta-device", "a rank makes only what it holds"),
    _unheard("--data-parallel-random-init", "initial values depend on --seed alone"),
    _unheard("--deterministic-mode", "ranks sum in a fixed order, a GPU's kernels choose theirs"),
    _unheard("--rerun-mode", "no step is run again to check it", str),
    _refused("--fp8-format", _NO_FP8, str),
    _refused("--fp8-hybrid", _NO_FP8),
    _refused("--fp8-e4m3", _NO_FP8),
    _refused("--fp8-param-gather", _NO_FP8),
    _refused("--fp8-amax-history-len", _NO_FP8, int),
    _refused("--fp8-amax-compute-algo", _NO_FP8, str),
    # How it is spread.
    Rule("--tensor-model-parallel-size", int, (1,), "blocks are not cut", _SHARD),
    Rule("--pipeline-model-parallel-size", int, (1,), "layers are not cut", _SHARD),
    Rule("--context-parallel-size", int, (1,), "sequences are not cut", _FIT_LONG),
    Rule("--expert-model-parallel-size", int, (1,), "LLaMA is dense", "LLaMA is dense: give 1"),
    _refused(
        "--sequence-parallel",
        "it belongs to tensor parallelism; to save the same "
        "activations give --recompute-activations, or --recompute-granularity full",
    ),
    _refused(
        "--num-layers-per-virtual-pipeline-stage",
        "there is no pipeline; give --paro-strategy GGG to spread the model",
        int,
    ),
    _refused(
        "--tp-comm-overlap",
        "there is no tensor parallelism; gathers and reductions overlap "
        "by themselves, see --paro-prefetch-units",
    ),
    _refused("--use-torch-fsdp2", "give --paro-strategy GGG, or III to stay inside groups"),
    _refused(
        "--use-megatron-fsdp",
        "give --paro-strategy NNN, NNG, NGG or GGG for its no_shard, "
        "optim, optim_grads or optim_grads_params",
    ),
    _refused(
        "--data-parallel-sharding-strategy",
        "give --paro-strategy NNN, NNG, NGG or GGG for "
        "no_shard, optim, optim_grads or optim_grads_params",
        str,
    ),
    Rule(
        "--num-distributed-optimizer-instances",
        int,
        (1,),
        "optimizer state has one instance",
        "give --paro-strategy NNI and, as --paro-group-size, the number of ranks / {value}",
    ),
    _switch("--overlap-grad-reduce", "reductions overlap, see --paro-prefetch-units"),
    _switch("--overlap-param-gather", "gathers overlap, see --paro-prefetch-units"),
    _switch("--no-async-tensor-model-parallel-allreduce", "there is no tensor parallelism"),
    _switch("--ddp-average-in-collective", "gradients are scaled before they are summed"),
    _unheard("--ddp-bucket-size", "gradients are reduced unit by unit", int),
    _unheard("--ddp-num-buckets", "gradients are reduced unit by unit", int),
    # Optimizer, data, checkpoints.
    _switch(
        "--no-check-for-nan-in-loss-and-grad",
        "a step that is not finite is skipped and does not end the run",
    ),
    Rule("--optimizer", str, ("adam",), "the optimizer is AdamW", "give adam, which is AdamW"),
    _refused("--decoupled-lr", _ONE_LR, float),
    _refused("--decoupled-min-lr", _ONE_LR, float),
    Rule(
        "--dataloader-type",
        str,
        ("single",),
        "samples are read in one pass",
        "samples are read in one pass: give single",
    ),
    _switch("--no-create-attention-mask-in-dataloader", "attention is causal without a mask"),
    _unheard("--no-mmap-bin-files", "corpora are read through memory maps"),
    _unheard("--tiktoken-pattern", "TikTokenizer cuts texts as LLaMA-3 does", str),
    Rule(
        "--ckpt-format",
        str,
        ("torch_dist", "torch_dcp"),
        "checkpoints are torch.distributed.checkpoint's",
        "checkpoints are torch.distributed.checkpoint's: give torch_dcp",
    ),
    _switch("--no-save-rng", "no random state is kept: what is random follows from --seed"),
    _switch("--no-load-rng", "no random state is kept: what is random follows from --seed"),
    _switch("--use-dist-ckpt", "checkpoints are torch.distributed.checkpoint's"),
    _switch("--auto-detect-ckpt-format", "there is one format"),
    _switch("--ckpt-fully-parallel-save", "every rank saves what it alone holds"),
    _switch("--ckpt-fully-parallel-load", "every rank loads what it holds"),
    _switch("--dist-ckpt-optim-fully-reshardable", "checkpoints load under any strategy"),
    _unheard("--no-ckpt-fully-parallel-save", "every rank saves what it alone holds"),
    _unheard("--dist-ckpt-strictness", "a checkpoint has to match the model exactly", str),
    # What is reported.
    _switch("--log-validation-ppl-to-tensorboard", "perplexity is always written"),
    _switch("--log-memory-to-tensorboard", "memory is always written"),
    _switch("--log-world-size-to-tensorboard", "the number of ranks is always written"),
    _switch("--log-batch-size-to-tensorboard", "the batch size is always written"),
    _unheard("--no-log-loss-scale-to-tensorboard", "the loss scale is always written"),
)


def add_compatibility_args(parser: ArgumentParser) -> None:
    """Adds every flag of `RULES`; one that is not given leaves no trace in the namespace."""
    group = parser.add_argument_group(
        "Megatron-LM compatibility",
        "Accepted so that LLaMA scripts run unchanged; every one says why it changes nothing, or "
        "what to use instead.",
    )
    for rule in RULES:
        if rule.takes is None:
            group.add_argument(
                rule.flag, action="store_true", default=argparse.SUPPRESS, help=_help(rule)
            )
        else:
            group.add_argument(
                rule.flag, type=rule.takes, default=argparse.SUPPRESS, metavar="X", help=_help(rule)
            )


def _help(rule: Rule) -> str:
    if rule.accepts == ():
        return "refused: " + rule.instead
    if rule.notice:
        return f"no effect: {rule.why}"
    values = "" if rule.takes is None else " ".join(f"{value}," for value in rule.accepts or ())
    return f"accepted: {values} {rule.why}".replace("  ", " ")


def check_compatibility(args: Namespace) -> tuple[str, ...]:
    """Refuses what would train another model or need what is not here.

    Returns a line for each flag that was accepted and is not acted upon.
    """
    notices = []
    for rule in RULES:
        value = getattr(args, rule.dest, None)
        if value is None:
            continue
        given = rule.flag if rule.takes is None else f"{rule.flag} {value}"
        if rule.accepts is not None and value not in rule.accepts:
            instead = rule.instead.format(value=value)
            raise ValueError(f"{given} is not supported: {instead}")
        if rule.notice:
            notices.append(f"{given} has no effect: {rule.why}")
    return tuple(notices)
