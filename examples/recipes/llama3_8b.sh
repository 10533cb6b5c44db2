#!/usr/bin/env bash
# LLaMA-3-8B at 8,192 tokens on 8 GPUs of 80 GB, trained as MLPerf's reference trains LLaMA-3.1-8B.
#
#   bash examples/recipes/llama3_8b.sh CHECKPOINT_PATH DATA_PREFIX [FLAG ...]
# MOCK as data trains on synthetic tokens; flags at the end replace those of the recipe. DRY_RUN=1
# in front starts nothing. Data, expected loss and speed: examples/recipes/README.md.
#
# From the environment: TOKENIZER_MODEL (LLaMA-3's own file), GPUS_PER_NODE (8), NNODES (1),
# NODE_RANK, MASTER_ADDR, GPU_MEMORY_GB (84.9).
set -euo pipefail

NAME=llama3_8b
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9}
MOCK_VOCAB_SIZE=128256
TOKENIZER_ARGS=(
    --tokenizer-type TikTokenizer
    --tokenizer-model "${TOKENIZER_MODEL:-tokenizer.model}"
)
MODEL_ARGS=(
    --llama-preset llama3-8B
    --seq-length 8192
)
# 32 x 8192 tokens a step; 6,144 steps are the most that one of MLPerf's 20 runs needed. Their rate
# falls over 1.2 million steps, so it is nearly constant. All states are sharded over the node (III
# on one node is ZeRO-3). An evaluation every 12,288 samples reads 1,024.
TRAINING_ARGS=(
    --paro-strategy III
    --micro-batch-size 1
    --global-batch-size 32
    --train-iters 6144
    --lr 8.0e-4
    --min-lr 8.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 1200000
    --lr-warmup-iters 128
    --adam-eps 1.0e-5
    --eval-interval 384
    --eval-iters 32
)
# shellcheck source-path=SCRIPTDIR source=recipe.sh
source "$(dirname "$0")/recipe.sh"
