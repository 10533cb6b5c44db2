"""Mistakes in flags: one line names the flag with its value, and a setting that works."""

from __future__ import annotations

import pytest

from paro.distributed.world import World
from tests.helpers.refusals import refused
from tests.helpers.training import configured
from tests.paro.config.test_run import PRESET, SMALL, configure

UNROUNDED = "--no-yarn-correction-range-round-to-int"
ROTATE = "--paro-materialize rotate"
EIGHT = World(size=8, ranks_per_node=4)
GQA = "--group-query-attention --num-query-groups"
KEEP = "--paro-recompute-keep core_attn"
COPIES = "--paro-nccl-copy-engine"
STEPS = "--step-batch-size-schedule"
FULL = "--recompute-granularity full"
MUON = "--optimizer muon"
OFFLOAD = "--optimizer-cpu-offload"
NORMS = "--trainable names:*norm*"
FP8 = "--fp8-format hybrid"
LOCAL = "--non-persistent-ckpt-type local"
RETAIN = "--save-retain-interval 5"
TRIPLE = f"--hidden-size 96 {GQA} 3 --num-attention-heads"


MISTAKES = [
    # Sharding
    ("--paro-group-size 3", "--paro-group-size 3 ... 4 ranks"),
    ("--paro-strategy XYZ", "--paro-strategy 'XYZ' is unknown"),
    ("--paro-strategy IGI", "--paro-strategy IGI ... IGG"),
    ("--paro-strategy IIG --paro-outer-steps 5", "--paro-outer-steps 5: ... IIG ... III"),
    ("--use-distributed-optimizer --paro-strategy GGG", "--use-distributed-optimizer ... NNG"),
    ("--paro-collective auto --paro-group-size 4", "--paro-collective auto ... one group"),
    ("--paro-machine nowhere.json", "nowhere.json: no such file"),
    ("--paro-collective ring --distributed-backend nccl", "--paro-collective ring sends"),
    ("--paro-prefetch-units -1", "--paro-prefetch-units -1"),
    ("--paro-updated-ahead 1", "--paro-updated-ahead 1"),
    ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 ... GGG"),
    (f"{COPIES} --distributed-backend gloo", f"{COPIES} is for GPUs ... leave one of them"),
    (f"{COPIES} --paro-strategy NIG", f"{COPIES} ... none: NIG"),
    (f"{COPIES} --paro-strategy III {ROTATE}", f"{COPIES} ... none ... {ROTATE}"),
    (f"{COPIES} --paro-strategy GGG --paro-group-size 1", f"{COPIES} ... --paro-group-size 1"),
    ("--paro-rotate-in-place", "--paro-rotate-in-place needs --paro-materialize rotate"),
    # The model
    ("--num-attention-heads 5", "--hidden-size 64 ... --num-attention-heads 5"),
    (f"{GQA} 3", "--num-query-groups 3"),
    ("--num-query-groups 2", "--num-query-groups 2 ... --group-query-attention"),
    *(
        (f"{model} --position-embedding-type yarn", "yarn needs --yarn-rotary-scaling-factor")
        for model in ("", "--llama-preset 7B")
    ),
    *(
        (f"--apply-layernorm-1p {decays}", "--apply-layernorm-1p ... --apply-wd-to-qk-layernorm")
        for decays in (
            "--apply-wd-to-qk-layernorm",
            "--no-weight-decay-cond-type apply_wd_to_qk_layernorm",
        )
    ),
    ("--no-weight-decay-cond-type some", "--no-weight-decay-cond-type: some is unknown"),
    ("--mup-output-mult 2", "--mup-output-mult 2.0 needs --use-mup"),
    (UNROUNDED, f"{UNROUNDED} needs --position-embedding-type yarn"),
    ("--llama-preset 7B --group-query-attention", "7B has no groups ... --num-query-groups"),
    ("--max-position-embeddings 16", "--seq-length 32 ... 16: give --max-position-embeddings 32"),
    (f"--recompute-activations {FULL}", "--recompute-activations and --recompute-granularity full"),
    ("--recompute-method block", f"--recompute-method ... {FULL}: give"),
    (KEEP, f"{KEEP} needs {FULL}"),
    (f"{KEEP} {FULL}", "in fp32 on a GPU: give --bf16 ... or leave --paro-recompute-keep out"),
    (f"{KEEP} {FULL} --attention-backend fused", "fused ... give auto or flash, or leave"),
    (f"{KEEP} {FULL} --bf16 --paro-strategy III {ROTATE}", f"{ROTATE} ... leave"),
    (f"{FULL} --recompute-modules core_attn", "--recompute-modules core_attn needs ... selective"),
    ("--recompute-activations --recompute-modules mlp", "mlp is not supported ... full"),
    ("--recompute-activations --recompute-modules core_attn moe", "moe is not supported ... full"),
    # Precision
    ("--fp16 --bf16", "--fp16 and --bf16 contradict"),
    ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 ... --bf16"),
    (f"{MUON} --muon-momentum 1", "--muon-momentum 1.0 must be in [0, 1)"),
    (f"{MUON} --muon-num-ns-steps 0", "--muon-num-ns-steps 0 ... [1, 100)"),
    (f"{MUON} {NORMS}", f"{MUON} ... has none: leave it"),
    (f"{MUON} --paro-strategy III {ROTATE}", f"{MUON} ... leave one"),
    (f"{OFFLOAD} --optimizer muon", f"{OFFLOAD} and --optimizer muon"),
    ("--optimizer-offload-fraction 0.5", f"needs {OFFLOAD}"),
    (f"{OFFLOAD} --optimizer-offload-fraction 0", "--optimizer-offload-fraction 0.0"),
    ("--ema-decay 1", "--ema-decay 1.0 must be in [0, 1)"),
    ("--ema-decay 0.9 --ema-interval 0", "--ema-interval 0 must be at least 1"),
    ("--ema-decay 0.9 --ema-start -1", "--ema-start -1 must be at least 0"),
    ("--ema-start 5", "--ema-start ... --ema-decay"),
    ("--ema-decay 0.9 --ema-start 11 --train-iters 10", "averages nothing ... 11 ... 10"),
    ("--ema-decay 0.9 --ema-interval 11 --train-iters 10", "averages nothing ... 11 ... 10"),
    ("--eval-ema", "--eval-ema needs --ema-decay"),
    ("--ema-decay 0.9 --eval-ema --skip-train", "--eval-ema and --skip-train ... --weights ema"),
    ("--ema-decay 0.9 --paro-strategy III --paro-outer-steps 6", "6 and --ema-decay 0.9"),
    (f"{OFFLOAD} --paro-strategy III --paro-outer-steps 6", f"6 and {OFFLOAD}"),
    ("--exp-avg-dtype fp16", "--exp-avg-dtype fp16 ... give bf16, or fp32"),
    (f"{FP8} --ffn-hidden-size 40", "--ffn-hidden-size, which is 40 ... leave fp8"),
    (f"{FP8} --kv-channels 2", "change --num-attention-heads x --kv-channels, which is 8"),
    (f"{FP8} --seq-length 9", "--micro-batch-size x --seq-length, which is 18"),
    (f"{FP8} --paro-strategy III {ROTATE}", "rotate has no fp8"),
    (f"--torch-compile inductor --paro-strategy III {ROTATE}", "leave --torch-compile out, or"),
    ("--torch-compile inductor --trace-nan", "--trace-nan and --torch-compile inductor"),
    ("--torch-compile inductor --lora-rank 2", "leave it or --lora-rank out"),
    # Adapters
    ("--lora-alpha 3", "--lora-alpha 3.0 ... --lora-rank"),
    ("--lora-base-dtype bf16", "--lora-base-dtype bf16 ... --lora-rank"),
    ("--lora-rank 2 --lora-base-dtype bf16 --fp16", "bf16 and --fp16 contradict each other"),
    ("--lora-rank 2 --trainable last-blocks:0.5", "last-blocks:0.5 and --lora-rank contradict"),
    ("--lora-rank 65", "--lora-rank 65 is above the 64 of wq"),
    # Lengths and learning rates
    ("--train-iters 0", "--train-iters 0"),
    ("--train-samples 96", "--train-iters and --train-samples"),
    ("--lr 0", "--lr 0.0"),
    ("--min-lr 0.2", "--min-lr 0.2 ... --lr 0.1"),
    ("--param-group names:*.wr lr-mult=2", "--param-group names: ... '*.wr' ... blocks.*.wq"),
    ("--param-group names:*.wq wd-mult=2 names:*.w[qq] lr-mult=2", "names:*.w[qq]: groups before"),
    (f"{NORMS} --param-group names:*.wq,*.wk lr-mult=2", "names:*.wq,*.wk has only frozen"),
    (f"{NORMS} --decoupled-lr 0.1", "--decoupled-lr 0.1 ... frozen: leave it out"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "--lr-warmup-fraction and --lr-warmup-iters"),
    ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction 1.5"),
    ("--weight-decay-incr-style linear", "--start-weight-decay and"),
    ("--end-weight-decay 0.3", "constant takes --weight-decay"),
    # Batches
    ("--global-batch-size 12", "--global-batch-size 12 ... 4 data-parallel ranks"),
    (f"{STEPS} 0:8", "--global-batch-size contradict"),
    ("--eval-global-batch-size 12", "--eval-global-batch-size 12 is not divisible"),
    # Data and vocabulary
    ("--data-path corpus", "--mock-data and --data-path contradict"),
    ("--full-validation", "--full-validation needs a corpus"),
    ("--tokenizer-type Llama2Tokenizer", "--tokenizer-model"),
    ("--tokenizer-type GPT2BPETokenizer", "GPT2BPETokenizer needs --vocab-file"),
    ("--tokenizer-type BertWordPieceCase", "BertWordPieceCase is not supported"),
    ("--tokenizer-type WordTokenizer", "WordTokenizer is unknown: choose one of"),
    ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0"),
    *(
        (f"{flag} {10**12}", flag)
        for flag in ("--make-vocab-size-divisible-by", "--padded-vocab-size")
    ),
    ("--padded-vocab-size 99", "--padded-vocab-size 99 is less than the 100 entries"),
    # Intervals, checkpoints and reports
    ("--eval-iters -1", "--eval-iters -1"),
    ("--skip-train --eval-iters 0", "--skip-train and --eval-iters 0"),
    (RETAIN, f"{RETAIN} needs --save-interval, of which it is a multiple"),
    (f"{RETAIN} --save-interval 3", f"{RETAIN} must be a multiple of --save-interval 3"),
    ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load"),
    ("--use-checkpoint-args", "--use-checkpoint-args needs --load"),
    ("--start-over", "--start-over needs --save"),
    ("--save-hf-dtype bf16", "--save-hf-dtype bf16 needs --save-hf"),
    ("--save-hf s3://bucket/hf", "--save-hf: it takes a local path"),
    ("--save-hf x --skip-train", "--save-hf x and --skip-train contradict"),
    ("--save-hf x --lora-rank 2", "--save-hf x ... adapters ... tools/convert_checkpoint.py"),
    ("--save-hf x --use-mup", "--save-hf x: ... --use-mup"),
    ("--save-hf /proc", "--save-hf /proc exists: remove it"),
    ("--save-hf x --save x/y", "--save-hf x must not be or hold --save x/y"),
    ("--save-hf x --save ./x --load x", "--save-hf x must not be or hold --save ./x"),
    (
        "--save-hf x/iter_9 --save ./x",
        "--save-hf x/iter_9 is where a checkpoint goes: give another",
    ),
    ("--save-hf /proc/run/hf", "--save-hf /proc/run/hf cannot be written: /proc"),
    ("--non-persistent-save-interval 3", f"needs {LOCAL}"),
    (f"{LOCAL} --non-persistent-save-interval 0", "interval 0 must be at least 1"),
    (f"{LOCAL} --save x", "--non-persistent-ckpt-type ... --load x"),
    ("--log-interval 0", "--log-interval 0"),
    ("--logging-level -1", "--logging-level -1"),
    ("--peak-tflops 0", "--peak-tflops 0"),
    ("--profile --profile-step-start 12", "--profile-step-start 12 must be below"),
    ("--use-pytorch-profiler", "--use-pytorch-profiler needs --profile"),
    ("--save /proc/run", "--save /proc/run cannot be written: /proc"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_it_names_what_to_change(words: str, message: str) -> None:
    refused(lambda: configure(f"{SMALL} {words}"), message)


TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 100 "
ITERS = " --train-iters 10"
WEIGHED = "--train-data-path x --valid-data-path 1 y 2 z --multiple-validation-sets"
BATCH = " --global-batch-size 32"


@pytest.mark.parametrize(
    ("without", "words", "message"),
    [
        ("--num-layers 4 ", "", "--num-layers is missing; --llama-preset"),
        (ITERS, "", "--train-iters or --train-samples"),
        (ITERS, "--train-samples 31", "--train-samples 31 ... 32"),
        (" --mock-data", "", "--data-path"),
        (" --mock-data", "--data-path x --multiple-validation-sets", "needs --valid-data-path"),
        (" --mock-data", WEIGHED, "has weights"),
        (f"{TOKENIZER}--mock-data", "--data-path x", "--tokenizer-type"),
        (TOKENIZER, "--vocab-file no/v --merge-file /dev/null", "--vocab-file no/v is missing"),
        (BATCH, f"{STEPS} 0:12", f"{STEPS} ... the size 12 ... 4 data-parallel ranks"),
        (BATCH, f"{STEPS} 0:8 --seq-length 0", "--seq-length 0 must be at least 1"),
        (BATCH, f"{STEPS} 0:8 --rampup-batch-size 8 8 64", f"{STEPS} ... --rampup-batch-size"),
        (SMALL, f"{PRESET} --llama-preset 7B --vocab-size 0", "--vocab-size 0"),
    ],
)
def test_what_is_missing_or_stands_alone_is_named(without: str, words: str, message: str) -> None:
    assert without in SMALL
    refused(lambda: configure(f"{SMALL.replace(without, '')} {words}"), message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--paro-strategy NIG", "NIG shards them over 1 and 4 ... use III or IIG"),
        ("--paro-strategy IGG", "IGG shards them over 4 and 8 ... --paro-group-size"),
        ("--paro-strategy GGG", "over 8 and 8, in groups of 4"),
        ("--paro-strategy IIG --paro-group-size 1", "in groups of 1"),
        ("--num-attention-heads 6 --hidden-size 96", "would work: 2 (--paro-group-size)"),
        (f"{GQA} 2", "--num-query-groups 2 ... would work: 2"),
        ("--num-attention-heads 3 --hidden-size 96", "would work: none"),
        ("--ffn-hidden-size 3", "--ffn-hidden-size 3 is too small"),
    ],
)
def test_what_cannot_rotate_is_refused_with_what_could(words: str, message: str) -> None:
    refused(lambda: configure(f"{SMALL} {ROTATE} {words}", EIGHT), message)


CONTEXT = "--cp-comm-type a2a --context-parallel-size"
RINGS = "--context-parallel-size 8"
SIZES = "--hierarchical-context-parallel-sizes"


OF_SHARED_SAMPLES = [
    (f"{CONTEXT} 0", "--context-parallel-size 0"),
    (f"{CONTEXT} 3", "--context-parallel-size 3 ... the 8 ranks: choose one of 1, 2, 4, 8"),
    (f"{CONTEXT} 8", "8 does not fit: 4 heads ... among 8 ranks: choose one of 1, 2 and 4"),
    (f"{CONTEXT} 4 --seq-length 28", "--seq-length 28 ... multiple of 8 ... 1 and 2"),
    (f"{CONTEXT} 4 {TRIPLE} 12", "3 heads of keys and values ... among 4 ranks: ... choose 1"),
    (f"{CONTEXT} 2 --paro-strategy III {ROTATE}", "--paro-materialize rotate ... choose 1"),
    (f"{RINGS} --cp-comm-type auto --paro-strategy III {ROTATE}", "8 does not fit ... rotate"),
    (f"{CONTEXT} 2 {SIZES} 2 1", "a2a+p2p: leave it out"),
    ("--context-parallel-size 2 --cp-comm-type a2a p2p", "a2a p2p: all blocks have one"),
    ("--cp-comm-type ring", "--cp-comm-type: invalid choice: 'ring' ... 'p2p'"),
    (f"{CONTEXT} 2 {FP8} --seq-length 8", "--seq-length / --context-parallel-size, which is 8"),
    (f"{CONTEXT} 2 --global-batch-size 12", "4 data-parallel ranks (= 8): choose 8 or 16"),
    (f"{RINGS} --cp-comm-type a2a+p2p", f"--cp-comm-type a2a+p2p needs {SIZES} ... 2 4"),
    (f"{RINGS} --cp-comm-type p2p {SIZES} 8", f"{SIZES} 8 ... {RINGS}"),
    (f"{RINGS} --cp-comm-type allgather {SIZES} 4 2", f"{SIZES} 4 2 ... p2p and a2a+p2p"),
    (f"{SIZES} 1 1", f"{SIZES} 1 1 ... without --context-parallel-size ... none do: leave it out"),
    (f"{SIZES} 2 4", "none do: give --context-parallel-size 8 too"),
    (f"{RINGS} --attention-backend unfused", "--attention-backend unfused ... a2a"),
    (RINGS, "16 channels in fp32 on a GPU: give --bf16 ... or --cp-comm-type a2a"),
    (f"{RINGS} --bf16 --kv-channels 12", "12 channels in bf16 ... of 8 ... (--kv-channels)"),
    (f"{RINGS} --cp-comm-type p2p --bf16 --seq-length 24", "24 is no multiple of 16"),
    (f"{RINGS} {SIZES} 8 1 --cp-comm-type a2a+p2p", "8 ... 4 heads"),
    ("--context-parallel-size auto --bf16", "--context-parallel-size auto: give ... or measure"),
    ("--context-parallel-size many", "invalid number of ranks or auto value: 'many'"),
    (f"--context-parallel-size auto {SIZES} 2 2", "2 2 and ... auto contradict each other"),
    ("--cp-comm-type auto --context-parallel-size 4 --seq-length 28 --bf16", "28 is no multiple"),
]


@pytest.mark.parametrize(("words", "message"), OF_SHARED_SAMPLES)
def test_what_ranks_cannot_share_is_refused_with_what_they_could(words: str, message: str) -> None:
    refused(lambda: configure(f"{SMALL} {words}", EIGHT), message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--world-size 8", "--world-size 8 is for --dry-run"),
        ("--device-memory-gb 80", "--device-memory-gb 80.0 is for --dry-run"),
        ("--show-step", "--show-step is for --dry-run"),
        ("--dry-run --world-size 0", "--world-size 0 must be a positive number"),
        ("--dry-run --world-size 12", "--world-size 12 is no multiple of the 8 ranks of a node"),
        ("--dry-run --world-size 8 --device-memory-gb 0", "--device-memory-gb 0.0 must be"),
        (
            "--context-parallel-size auto --bf16 --dry-run --world-size 16",
            "auto: the machine cannot be measured, a dry run starts no ranks: give --paro-machine",
        ),
        # Bounds
        ("--num-layers 10000000", "--num-layers 10000000 ... at most 1024"),
        ("--global-batch-size 1000000000000", "--global-batch-size is 500000000000 micro-batches"),
        (f"--train-iters {10**30}", "--train-iters ... must be at most 9223372036854775807"),
        ("--train-iters 1000000000000", "--train-iters 1000000000000 ... at most 1000000000"),
        ("--hidden-size 1000000000", "--hidden-size 1000000000 ... at most 1048576"),
        ("--global-batch-size 8 --rampup-batch-size 4 4 1000000000000", "--rampup-batch-size 4 4"),
        ("--distributed-timeout-minutes 1000000", "--distributed-timeout-minutes 1000000 must be"),
    ],
)
def test_what_no_launch_can_have_is_refused(words: str, message: str) -> None:
    refused(lambda: configured(f"{SMALL} {words}"), message)
