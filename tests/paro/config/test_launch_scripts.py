"""Flags of public launch scripts: one answer, then the flags that it leaves run dry."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paro.launch.dry_run import run_dry
from tests.fixtures.write import write_words
from tests.helpers.flags import configured
from tests.helpers.refusals import refused
from tests.paro.config.test_mistakes import answer

# Facts of the scripts, by topic. A tokenizer without files stands in for theirs, unless one names a
# type that Megatron-LM does not have, for which there is a file.
TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 128256"
LLAMA = (
    "--group-query-attention --num-query-groups 8 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear "
    "--attention-dropout 0.0 --hidden-dropout 0.0"
)
SIZES_70B = "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
SIZES_8B = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
ADAM = "--weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FOLDERS = "--save c --load c --tensorboard-dir t"
GPT3_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 "
    f"--global-batch-size 1536 --train-iters 500000 {ADAM} --init-method-std 0.006 --fp16 "
    "--lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
    "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--data-path corpus --split 949,50,1 --log-interval 100 --save-interval 10000 "
    f"--eval-interval 1000 --eval-iters 10 {FOLDERS}"
)
SWISS = (
    f"{LLAMA} {ADAM} {OVERLAP} {FOLDERS} --transformer-impl transformer_engine "
    "--use-precision-aware-optimizer --main-grads-dtype bf16 --max-position-embeddings 8192 "
    "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 --log-throughput "
    "--make-vocab-size-divisible-by 128 --log-progress --no-log-loss-scale-to-tensorboard "
    "--log-memory-to-tensorboard --micro-batch-size 1 --global-batch-size 1024 "
    "--no-check-for-nan-in-loss-and-grad --train-iters 500 --log-interval 1 --eval-iters 0 "
    "--cross-entropy-loss-fusion --optimizer adam --dataloader-type single --manual-gc "
    "--manual-gc-interval 50 --exit-signal-handler --trigger-path trigger --seed 28 "
    "--init-method-std 0.008944 --lr-decay-style cosine --lr-warmup-iters 200 "
    "--save-interval 250 --ckpt-format torch_dist --async-save --bf16 --split 100,0,0 "
    "--seq-length 8192 --reset-position-ids --reset-attention-mask --eod-mask-loss "
    "--num-workers 1 --num-dataset-builder-threads 1 --data-path a --data-cache-path cache "
    "--wandb-save-dir w --wandb-project p --wandb-exp-name e"
)
AMD = (
    f"{LLAMA} {ADAM} {OVERLAP} --seq-length 2048 --max-position-embeddings 131072 "
    "--no-position-embedding --init-method-std 0.02 --micro-batch-size 2 --train-iters 10 "
    "--no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion "
    "--dataloader-type cyclic --save-interval 5000 --tensorboard-dir t --log-interval 1 "
    "--eval-interval 320000 --num-workers 8 --mock-data --data-cache-path c --log-throughput "
    "--no-save-optim --eval-iters -1 --no-gradient-accumulation-fusion --use-mcore-models "
    "--distributed-backend nccl --distributed-timeout-minutes 120 --use-flash-attn --lr 1e-4 "
    "--min-lr 1e-5 --lr-decay-iters 320000 --lr-decay-style cosine --ckpt-format torch_dist "
    "--optimizer adam --transformer-impl=transformer_engine --attention-softmax-in-fp32"
)
SCRIPTS = {
    "LLaMA-3 8B in FP8, NVIDIA": (
        8,
        f"{SIZES_8B} {LLAMA} {ADAM} {OVERLAP} {FOLDERS} --use-mcore-models --kv-channels 128 "
        "--seq-length 8192 --max-position-embeddings 8192 --rotary-base 1000000 "
        "--rotary-percent 1.0 --init-method-std 0.0134 --attention-backend fused "
        "--apply-layernorm-1p --micro-batch-size 1 --global-batch-size 128 "
        "--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 "
        "--lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 "
        "--lr-decay-style cosine --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
        "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
        "--exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024 "
        "--fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1 "
        "--context-parallel-size 1 --sequence-parallel --mock-data --data-cache-path cache "
        "--tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader "
        "--no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 "
        "--eval-interval 100 --save-interval 1000 --log-throughput --profile "
        "--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist "
        "--distributed-timeout-minutes 60",
    ),
    "GPT-3 175B, NVIDIA": (
        128,
        f"{GPT3_175B} --step-batch-size-schedule "
        "'0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536'",
    ),
    "LLaMA-3 8B, Swiss AI": (16, f"{SIZES_8B} {SWISS} --lr 0.00022 --min-lr 0.000022"),
    "LLaMA-3.1 8B in FP8, AMD": (
        8,
        f"{SIZES_8B} {AMD} --global-batch-size 128 --fp8-margin=0 --fp8-format=hybrid "
        "--fp8-interval=1 --fp8-amax-history-len=1024 --fp8-amax-compute-algo=max "
        "--tensor-model-parallel-size 1 --sequence-parallel --recompute-num-layers 32 "
        "--recompute-granularity full --recompute-method block",
    ),
    "LLaMA-3.1 70B, Swallow": (
        128,
        f"{SIZES_70B} {LLAMA} {ADAM} {OVERLAP} --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 5 "
        "--context-parallel-size 2 --cp-comm-type a2a --recompute-granularity full "
        "--sequence-parallel --distributed-timeout-minutes 15 "
        "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
        "--global-batch-size 1024 --train-iters 27500 --reset-position-ids "
        "--reset-attention-mask --no-load-rng --no-load-optim --save d "
        "--data-path 1 a 2 b --split 990,10,0 --distributed-backend nccl --lr 1.0E-5 "
        "--min-lr 1.0E-6 --lr-decay-style cosine --lr-decay-iters 27500 "
        "--lr-warmup-iters 1000 --optimizer adam --log-interval 1 --save-interval 250 "
        "--no-initialization --eval-interval 500 --eval-iters 10 --bf16 "
        "--no-position-embedding --rotary-base 500000.0 --rope-factor 8.0 "
        "--rope-low-freq-factor 1.0 --rope-high-freq-factor 4.0 "
        "--rope-original-max-positional-embeddings 8192 --use-mcore-models --norm-epsilon 1e-5 "
        "--no-masked-softmax-fusion --use-flash-attn --attention-softmax-in-fp32 "
        "--accumulate-allreduce-grads-in-fp32 --transformer-impl transformer_engine --use-mpi "
        "--use-z-loss --log-throughput --wandb-name j --wandb-project p --wandb-entity e "
        "--tokenizer-type Llama3Tokenizer --tokenizer-model tokenizer.json",
    ),
}

# What is among the flags that are left and was not among those given.
ADDED = {
    "GPT-3 175B, NVIDIA": (
        "'0:128 2.4B:384 4.8B:640 7.2B:1024 9.6B:1280 12B:1536' --paro-strategy GGG"
    ),
    "LLaMA-3 8B, Swiss AI": "--grad-reduce-in-bf16",
    "LLaMA-3.1 8B in FP8, AMD": "0 --transformer-impl transformer_engine --fp8-format hybrid",
    "LLaMA-3.1 70B, Swallow": (
        "--use-rope-scaling --rope-scaling-factor --rope-scaling-low-freq-factor "
        "--rope-scaling-high-freq-factor --rope-scaling-original-max-position-embeddings "
        "--wandb-exp-name HuggingFaceTokenizer --paro-strategy GGG"
    ),
}

FIT_80_GB = ("LLaMA-3 8B, Swiss AI", "LLaMA-3.1 70B, Swallow")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_that_an_answer_leaves_run_dry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_words(Path("tokenizer.json"))
    num_ranks, flags = SCRIPTS[name]
    plan = f"--dry-run --world-size {num_ranks} --device-memory-gb 80"
    tokenizer = "" if "--tokenizer-type" in flags else TOKENIZER
    given = f"{flags} {tokenizer} {plan}"
    words, (_, kept) = shlex.split(given), answer(given)
    config = configured(kept)
    if name in FIT_80_GB:
        run_dry(config)
        assert "the launch is sound" in capsys.readouterr().out
    else:
        refused(lambda: run_dry(config), "a rank needs ... more than --device-memory-gb 80")
    assert shlex.join(word for word in kept if word not in words) == ADDED.get(name, "")
    for flag in ("--num-layers", "--hidden-size", "--lr", "--seq-length"):
        assert kept[kept.index(flag) + 1] == words[words.index(flag) + 1]
    assert config.batches.global_batch_size in (128, 1024, 1536)
    if "--train-samples" in words:
        assert config.train.train_iters == 1953125000 // 128
        assert config.schedule.lr_decay_samples == 1949218748
