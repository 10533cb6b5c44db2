"""Flags of the model and of its training: sizes, batches, schedules, precision."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from model.config import (
    ATTENTION_BACKENDS,
    COMPILERS,
    LLAMA_PRESETS,
    POSITION_EMBEDDINGS,
    preset_name,
)
from paro.arguments.flag_parser import AddFlag, flag_group
from paro.arguments.param_groups import add_mup_args, add_param_group_args
from paro.schedule.lr_schedule import DECAY_STYLES, WEIGHT_DECAY_STYLES, WSD_DECAY_STYLES
from paro.schedule.step_checks import EXIT_AFTER_SKIPPED
from paro.spec.optim_config import COEFFICIENT_TYPES, SCALE_MODES

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


# Flags in two or three lines each read as a table; the formatter would use six.
# fmt: off


def _add_kernel_args(add: AddFlag) -> None:
    synonyms = {"cudnn": "fused", "math": "unfused"}
    add("--attention-backend", type=lambda name: synonyms.get(name, name), metavar="NAME",
        choices=ATTENTION_BACKENDS, default="auto",
        help="the kernel of attention: flash; fused or cudnn; unfused, local or math, matrix "
        "products that keep all scores; auto (the default): what torch chooses. It is tried at "
        "the start, and logged")
    add("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion",
        help="compute SwiGLU by torch's operations; without it a GPU does it in one pass, by a "
        "kernel of Triton, where that works: it is tried at the start, and logged")
    add("--no-rope-fusion", action="store_false", dest="apply_rope_fusion",
        help="the same of the rotary embedding")
    add("--torch-compile", choices=COMPILERS, metavar="BACKEND",
        help="compile blocks by torch.compile, all of them together at the first step, which then "
        "takes longer: inductor writes kernels, and needs a C++ compiler, on a GPU Triton "
        "too; aot_eager only records a graph, to look for errors")


def _add_position_args(add: AddFlag) -> None:
    add("--rotary-base", type=float, metavar="BASE",
        help="base of the rotary embedding's wavelengths; default 10000")
    add("--rotary-seq-len-interpolation-factor", type=float, metavar="X",
        help="divide positions by X (linear RoPE scaling); default 1")
    add("--use-rope-scaling", action="store_true", default=None,
        help="stretch long wavelengths as LLaMA-3.1 does, by --rope-scaling-factor")
    add("--rope-scaling-factor", type=float, metavar="X",
        help="how far --use-rope-scaling stretches; default 8")
    add("--rope-scaling-original-max-position-embeddings", type=int, metavar="TOKENS",
        help="the context that --use-rope-scaling stretches; default 8192")
    add("--rope-scaling-low-freq-factor", type=float, metavar="X",
        help="what turns fewer than X times over that context is stretched in full; default 1")
    add("--rope-scaling-high-freq-factor", type=float, metavar="X",
        help="what turns more than X times is not stretched; default 4")
    add("--position-embedding-type", choices=POSITION_EMBEDDINGS, metavar="TYPE",
        help="rope, or yarn: rotary positions stretched by YaRN; default: the preset's, or rope")
    add("--yarn-rotary-scaling-factor", type=float, metavar="X",
        help="how far YaRN stretches long wavelengths, at least 1")
    add("--yarn-original-max-position-embeddings", type=int, metavar="TOKENS",
        help="the context that YaRN stretches; default 4096")
    add("--yarn-beta-fast", type=float, metavar="X",
        help="what turns more than X times over that context is not stretched; default 32")
    add("--yarn-beta-slow", type=float, metavar="X",
        help="what turns fewer than X times over that context is stretched in full; default 1")
    add("--yarn-mscale", type=float, metavar="X",
        help="weight of log(factor) in the scale of queries and keys, over that of "
        "--yarn-mscale-all-dim; default: a scale of 1 + 0.1 log(factor)")
    add("--yarn-mscale-all-dim", type=float, metavar="X",
        help="weight of log(factor) by whose scale that of --yarn-mscale is divided")
    add("--yarn-correction-range-round-to-int", action=BooleanOptionalAction,
        help="round the pairs of channels between which YaRN interpolates outwards (the default)")


def add_model_args(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "model", "LLaMA: RMSNorm, SwiGLU, rotary embedding, no dropout; no biases but Qwen2's.")
    add = group.add_argument
    add("--llama-preset", type=preset_name, choices=list(LLAMA_PRESETS), metavar="NAME",
        help="take all sizes from a published model; explicit flags win; case and dashes do not "
        "matter. One of, the smallest first: " + " ".join(LLAMA_PRESETS))
    add("--num-layers", type=int, metavar="N", help="transformer blocks; needed without a preset")
    add("--hidden-size", type=int, metavar="N", help="width of the model; needed without a preset")
    add("--ffn-hidden-size", type=int, metavar="N",
        help="width inside the MLP; default 8/3 of --hidden-size, rounded down to 64")
    add("--num-attention-heads", type=int, metavar="N",
        help="query heads; needed without a preset")
    add("--group-query-attention", action="store_true",
        help="let groups of query heads share keys and values, see --num-query-groups")
    add("--num-query-groups", type=int, metavar="N",
        help="key and value heads under --group-query-attention (default 1) or a preset")
    add("--kv-channels", type=int, metavar="N",
        help="size of one head; default --hidden-size / --num-attention-heads")
    add("--max-position-embeddings", type=int, metavar="TOKENS",
        help="longest sequence the model is made for; default: the preset's, or --seq-length")
    _add_position_args(add)
    add("--add-qkv-bias", action="store_true", default=None,
        help="add biases to queries, keys and values, as Qwen2 does; default: the preset's, or off")
    add("--qk-layernorm", action="store_true", default=None,
        help="normalize every head's query and key, as Qwen3 does; default: the preset's, or off")
    _add_kernel_args(add)
    add("--norm-epsilon", type=float, metavar="EPS",
        help="added under the root of RMSNorm; default 1e-5")
    add("--init-method-std", type=float, metavar="STD",
        help="standard deviation of initial weights; output layers get STD / sqrt(2 layers); "
        "default 0.02")
    tie = group.add_mutually_exclusive_group().add_argument
    tie("--tie-embeddings-and-output-weights", action="store_true", default=None,
        help="use the embedding as the output layer; default: the preset's, or off")
    tie("--untie-embeddings-and-output-weights", action="store_false", default=None,
        dest="tie_embeddings_and_output_weights",
        help="have an output layer of its own, whatever the preset says")
    add("--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
        help="pad the vocabulary of embedding and output layer to a multiple of N")
    add("--padded-vocab-size", type=int, metavar="N",
        help="give embedding and output layer exactly N rows, at least as many as the tokenizer "
        "has ids; --make-vocab-size-divisible-by does not count then")


def _add_check_args(add: AddFlag) -> None:
    add("--check-for-nan-in-loss-and-grad", action="store_true",
        help="stop at the first loss or gradient that is not finite, fp16 overflows apart, and "
        "name the ranks; without it such a step is skipped on all ranks")
    add("--trace-nan", action="store_true",
        help="repeat a step whose loss or gradients are not finite, and name the first unit, "
        "operation and rank whose result is not")
    add("--check-weight-hash-across-dp-replicas-interval", type=int, metavar="N",
        help="every N iterations compare what several ranks hold, parameters and optimizer states, "
        "by a hash, and stop with status 1 where they differ; default: never")
    add("--check-for-spiky-loss", action="store_true",
        help="skip a step whose loss is 6 standard deviations and a tenth above the mean of the "
        "last 50 or so, from iteration 100 on")
    add("--check-for-large-grads", action="store_true",
        help="skip a step whose gradient norm is 10 times the mean of the last 50 or so, from "
        "iteration 100 on")
    add("--spike-deviations", type=float, metavar="X",
        help="have both of these skip what is X standard deviations above its running mean instead")
    add("--spikes-in-a-row", type=int, default=0, metavar="N",
        help="train on a spike after N skipped steps in a row; 0: skip every one")
    add("--iterations-to-skip", type=int, nargs="+", default=(), metavar="N",
        help="iterations whose samples are read and not trained on")
    add("--exit-after-skipped-iterations", type=int, default=EXIT_AFTER_SKIPPED, metavar="N",
        help="stop without saving, with status 1, after N skipped steps in a row, fp16 overflows "
        "apart; 0: never")


@flag_group("training",
    "A step takes --global-batch-size samples: ranks x micro-batches x --micro-batch-size.")
def add_training_args(add: AddFlag) -> None:
    add("--micro-batch-size", type=int, metavar="SAMPLES",
        help="samples per rank and forward pass; needed")
    add("--global-batch-size", type=int, metavar="SAMPLES",
        help="samples per optimizer step over all ranks, a multiple of --micro-batch-size times "
        "ranks: gradients are accumulated; default: exactly that product")
    add("--trainable", default="all", metavar="WHAT",
        help="what trains; the rest is frozen and has no gradients and no optimizer state: all, "
        "last-blocks:SHARE (0.0625: the last sixteenth of the blocks), or names:PATTERN[,PATTERN] "
        "(names:*.wq,*.wv: parameters by name, * is any text)")
    add("--rampup-batch-size", type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with a global batch of START and add INCREMENT at equal distances over "
        "SAMPLES samples, up to --global-batch-size")
    add("--step-batch-size-schedule", metavar='"TOKENS:SIZE ..."',
        help="instead of both: the global batch sizes and the tokens after which each begins, such "
        'as "0:768 250B:1536"; K, M, B and T stand for thousands and so on')
    add("--seq-length", type=int, metavar="TOKENS", help="tokens per sample; needed")
    add("--train-iters", type=int, metavar="N",
        help="optimizer steps in all, those before a resume included; this or --train-samples")
    add("--train-samples", type=int, metavar="N",
        help="samples in all, those before a resume included, in whatever batches; a last partial "
        "batch is left out")
    add("--calculate-per-token-loss", action="store_true",
        help="give all tokens of a global batch equal weight, not all micro-batches")
    add("--seed", type=int, default=1234, metavar="N",
        help="fixes initialization and the order of the data, on any number of ranks")
    add("--exit-interval", type=int, metavar="N", help="save and leave at every multiple of N")
    add("--exit-duration-in-mins", type=float, metavar="MINUTES",
        help="save and leave after so much time, counted from when the script began")
    add("--exit-signal-handler", action="store_true",
        help="end the step, save and leave when any rank gets SIGTERM, SIGINT (Ctrl-C), SIGHUP (a "
        "terminal that is closed; not under nohup) or --exit-signal")
    add("--exit-signal", choices=EXIT_SIGNALS, default="SIGTERM", help="one more such signal")
    _add_check_args(add)
    add("--manual-gc", action="store_true",
        help="keep Python's garbage collector from running by itself, at another time on each rank")
    add("--manual-gc-interval", type=int, default=0, metavar="N",
        help="with --manual-gc: collect every N iterations on all ranks; 0: never")
    add("--empty-unused-memory-level", type=int, choices=(0, 1, 2), default=0, metavar="LEVEL",
        help="give cached CUDA memory back every iteration, against fragmentation: 1, before the "
        "update; 2, after it too; 0: never")


@flag_group("adapters (LoRA)", "Small matrices beside the weights of every block train, and all "
    "else is frozen: a weight adds alpha / rank * B A of its input. Names and initial values are "
    "those of peft.")
def add_lora_args(add: AddFlag) -> None:
    add("--lora-rank", type=int, metavar="R", help="train adapters of this rank; default: none")
    add("--lora-alpha", type=float, metavar="A", help="scales them by A / R; default 8")
    add("--lora-dropout", type=float, metavar="P",
        help="drop this share of their input's elements in training; default 0")
    add("--lora-target-modules", metavar="MODULES",
        help="which projections have adapters: names of peft with commas between them, or "
        "all-linear, the seven of a block; default q_proj,v_proj")
    add("--lora-base-dtype", choices=("bf16",),
        help="hold and gather the frozen weights in bf16 where the adapters train in fp32")


@flag_group("recomputation", "Forget activations in forward and make them again in backward.")
def add_recompute_args(add: AddFlag) -> None:
    add("--recompute-activations", action="store_true",
        help="short for --recompute-granularity selective")
    add("--recompute-granularity", choices=("full", "selective"),
        help="full: whole blocks, keeping their inputs (a third more compute); selective: only the "
        "inside of attention, which saves the scores of --attention-backend unfused, and almost "
        "nothing with a fused kernel")
    add("--recompute-modules", nargs="+", metavar="MODULE",
        help="for selective: core_attn, the inside of attention (the default), and layernorm, "
        "which is always recomputed, as is the product of gate and up")
    add("--recompute-method", choices=("uniform", "block"),
        help="for full: uniform, all blocks in chunks of --recompute-num-layers (the default); "
        "block, only the first --recompute-num-layers blocks")
    add("--recompute-num-layers", type=int, metavar="N", help="see --recompute-method; default 1")
    add("--paro-recompute-keep", choices=("core_attn",),
        help="for full: but for attention, whose output and log-sum-exp blocks keep, so that it is "
        "not computed again, and keys and values do not travel again between ranks that share a "
        "sample; needs FlashAttention on a GPU")


@flag_group("regularization", "AdamW. LLaMA's recipe: --weight-decay 0.1 --adam-beta2 0.95.")
def add_regularization_args(add: AddFlag) -> None:
    add("--weight-decay", type=float, metavar="X", default=0.01,
        help="decoupled weight decay, norms excluded")
    add("--start-weight-decay", type=float, metavar="X",
        help="weight decay at the first sample, for --weight-decay-incr-style linear or cosine")
    add("--end-weight-decay", type=float, metavar="X", help="and after the last")
    add("--weight-decay-incr-style", choices=WEIGHT_DECAY_STYLES, default="constant",
        help="how weight decay goes from start to end; constant uses --weight-decay throughout")
    add("--clip-grad", type=float, default=1.0, metavar="NORM",
        help="scale gradients down to this global norm; 0: never")
    add("--z-loss-weight", type=float, default=0.0, metavar="W",
        help="add W log(Z)^2 to each token's loss in training, for its softmax's denominator Z, "
        "which keeps logits from drifting: 1e-4 in PaLM; logged apart from the loss; 0: none")
    add("--adam-beta1", type=float, metavar="X", default=0.9, help="decay of the mean of gradients")
    add("--adam-beta2", type=float, metavar="X", default=0.999,
        help="decay of the mean of their squares")
    add("--adam-eps", type=float, metavar="X", default=1e-8, help="keeps AdamW from dividing by 0")
    add("--adam-implementation", choices=("auto", "torch", "triton", "apex"), default="auto",
        help="torch's fused AdamW; Triton's, which unscales, clips, updates and casts in one pass, "
        "as it updates Muon's momentum, and computes half of Muon's symmetric products; FusedAdam "
        "of NVIDIA's apex, where installed from its source; auto (the default): Triton's on a GPU "
        "where it works, which is tried at the start, and logged, else torch's")


@flag_group("optimizer", "Muon is for the matrices of blocks; --adam-* and --weight-decay hold "
    "too.")
def add_optimizer_args(add: AddFlag) -> None:
    synonyms = {"dist_muon": "muon"}  # Megatron's old name of muon with sharded states
    add("--optimizer", type=lambda name: synonyms.get(name, name), choices=("adam", "muon"),
        default="adam",
        help="adam, which is AdamW; muon: Muon for the matrices of blocks, AdamW for all else")
    add("--optimizer-cpu-offload", action="store_true",
        help="keep masters, moments and averages in host memory, page-locked; they are copied to "
        "the GPU and back around the update of each unit. For models that fit no other way")
    add("--optimizer-offload-fraction", type=float, default=1.0, metavar="SHARE",
        help="with --optimizer-cpu-offload: at least this share of the states, from the last units")
    add("--muon-num-ns-steps", type=int, metavar="STEPS", default=5,
        help="steps of Newton-Schulz")
    add("--muon-momentum", type=float, metavar="X", default=0.9,
        help="decay of the mean of gradients")
    add("--muon-nesterov", action="store_true", help="read the mean a step ahead")
    add("--muon-coefficient-type", choices=COEFFICIENT_TYPES, default="quintic",
        help="their coefficients")
    add("--muon-scale-mode", choices=SCALE_MODES, default="spectral",
        help="factor on the orthogonal matrix, of OUT x IN elements: sqrt(max(OUT, IN)), "
        "sqrt(OUT / IN) or sqrt(max(1, OUT / IN))")
    add("--muon-extra-scale-factor", type=float, metavar="X", default=1.0,
        help="another factor; with spectral, 0.2 makes updates as large as AdamW's")
    add("--muon-fp32-matmul-prec", choices=("low", "medium", "high", "highest"),
        default="medium",
        help="of Newton-Schulz's matmuls: low and medium are bf16 where the device has such, high "
        "is TF32, highest fp32")


@flag_group("learning rate", "Counted in samples: iterations are converted by the batch size.")
def add_learning_rate_args(add: AddFlag) -> None:
    add("--lr", type=float, metavar="X", help="the highest learning rate; needed")
    add("--min-lr", type=float, metavar="X", default=0.0, help="the lowest, after the decay")
    add("--lr-decay-style", choices=DECAY_STYLES, default="linear",
        help="how it falls from --lr to --min-lr; WSD is stable until its tail")
    add("--lr-decay-iters", type=int, metavar="N",
        help="iterations until --min-lr, warm-up included; default: all")
    add("--lr-decay-samples", type=int, metavar="N", help="the same in samples")
    add("--lr-warmup-iters", type=int, metavar="N",
        help="iterations of linear warm-up; default 0")
    add("--lr-warmup-samples", type=int, metavar="N", help="the same in samples")
    add("--lr-warmup-fraction", type=float, metavar="X", help="the same as a part of the decay")
    add("--lr-warmup-init", type=float, default=0.0, metavar="X", help="where warm-up begins")
    add("--lr-wsd-decay-style", choices=WSD_DECAY_STYLES, default="exponential",
        help="the shape of WSD's tail")
    add("--lr-wsd-decay-iters", type=int, metavar="N", help="iterations of WSD's tail")
    add("--lr-wsd-decay-samples", type=int, metavar="N", help="the same in samples")
    add("--override-opt_param-scheduler", "--override-opt-param-scheduler", action="store_true",
        help="let the flags of learning rate and weight decay differ from those of --load")
    add("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler",
        action="store_true",
        help="keep the learning rate and weight decay schedules of --load, whatever flags say")


@flag_group("mixed precision", "Without a flag all is fp32. Master parameters always are.")
def add_mixed_precision_args(add: AddFlag) -> None:
    add("--bf16", action="store_true", help="compute and communicate in bfloat16")
    add("--fp16", action="store_true", help="compute and communicate in float16, loss scaled")
    add("--fp8-format", choices=("e4m3", "hybrid"),
        help="matrix products of the blocks' linear layers in fp8, sums in fp32; hybrid: gradients "
        "in e5m2. One scale per tensor, from its largest value. GPUs need compute capability 8.9; "
        "a CPU has the rounding, not the speed. MFU counts against the peak of --bf16")
    add("--grad-reduce-in-bf16", action="store_true",
        help="accumulate gradients in bf16 too: half the memory, less exact")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true",
        help="communicate gradients in fp32 too: twice the bytes, Megatron's bf16 numerics")
    add("--exp-avg-dtype", choices=("fp32", "bf16", "fp16", "fp8"), default="fp32",
        help="type of AdamW's mean of gradients; bf16: updated in fp32 and rounded at random, 2 "
        "bytes less a parameter in memory, checkpoints and local copies. fp16 and fp8 are refused")
    add("--exp-avg-sq-dtype", choices=("fp32", "bf16", "fp16", "fp8"), default="fp32",
        help="the same of the mean of their squares")
    add("--loss-scale", type=float, metavar="X",
        help="a constant factor on the loss; default: dynamic under --fp16, else 1")
    add("--initial-loss-scale", type=float, default=2.0**32, metavar="X",
        help="where the dynamic loss scale begins")
    add("--min-loss-scale", type=float, default=1.0, metavar="X", help="its lowest value")
    add("--loss-scale-window", type=int, default=1000, metavar="STEPS",
        help="it doubles after so many finite steps")
    add("--hysteresis", type=int, default=2, metavar="STEPS",
        help="it halves at a non-finite step once so many were seen since it last doubled")


@flag_group("fewer bits between groups", "What crosses groups once a step may be rounded to codes; "
    "all else stays exact.")
def add_inter_bits_args(add: AddFlag) -> None:
    add("--paro-inter-param-bits", type=int, choices=(16, 8, 4), default=16, metavar="BITS",
        help="bits in which updated parameters cross groups once a step: 16, their own type; 8 or "
        "4, codes of how much they changed, which saves half or three quarters of the bytes; norms "
        "and biases stay exact")
    add("--paro-inter-grad-bits", type=int, choices=(16, 8, 4), default=16, metavar="BITS",
        help="bits in which gradients cross groups once a step: 16, the type of communication; 8 "
        "or 4, codes of their Hadamard transforms, added up in fp32; those of norms and biases "
        "stay exact")
    add("--paro-inter-grad-error-feedback", action="store_true",
        help="add a moving average of what codes of gradients lost to later ones; takes a byte for "
        "each gradient element that a rank holds, kept in checkpoints but dropped where ranks or "
        "strategy change")
    add("--paro-inter-bits", choices=("auto",),
        help="auto: the planner chooses 4 bits for both where --paro-machine is faster with them, "
        "and 16 where packing costs more than it saves; without it the planner never chooses bits")
    add("--paro-inter-bits-warmup-iters", type=int, metavar="ITERATIONS",
        help="send 16 bits for so long at the start; default: the learning rate's warm-up")


@flag_group("outer steps", "For slow links between groups: each group trains alone, and groups "
    "meet every H steps.")
def add_outer_args(add: AddFlag) -> None:
    add("--paro-outer-steps", type=int, metavar="STEPS",
        help="steps that a group trains alone before groups meet (DiLoCo, PyTorch's local SGD); "
        "the strategy's states stay inside a group; default: all ranks train synchronously")
    add("--paro-outer-lr", type=float, metavar="X",
        help="learning rate of the outer optimizer, which steps along the groups' mean movement; "
        "default: 0.6, 0.4 for one group, 0.8 from 8 groups on or with Muon")
    add("--paro-outer-momentum", type=float, metavar="X",
        help="its momentum; default: 0.9, and 0.6 for one group with Muon")
    add("--no-paro-outer-nesterov", action="store_false", dest="paro_outer_nesterov",
        help="plain momentum in place of Nesterov's")
    add("--paro-outer-bits", type=int, choices=(32, 16, 8, 4), default=16, metavar="BITS",
        help="bits in which a value crosses groups: 32, 16 (bf16), or 8 or 4, quantized; what the "
        "anchor loses by it is sent in the next round")
    add("--paro-outer-fragments", type=int, default=1, metavar="NUMBER",
        help="parts of the model that meet one after another, each every so many steps: less is "
        "sent at a time")
    add("--paro-outer-delay", type=int, default=0, metavar="STEPS",
        help="steps of training under which the messages of a round travel; less than the steps "
        "between two rounds")
    add("--paro-outer-warmup", type=int, default=100, metavar="STEPS",
        help="steps at the start of the run in which all ranks train synchronously")


# In the order of --help.
MODEL_GROUPS = (
    add_model_args, add_training_args, add_lora_args, add_recompute_args, add_regularization_args,
    add_optimizer_args, add_learning_rate_args, add_param_group_args, add_mup_args,
    add_mixed_precision_args,
)
