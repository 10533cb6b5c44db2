#!/usr/bin/env bash
# LLaMA-3-8B at 8,192 tokens on 8 GPUs of 80 GB: the configuration whose speed others publish.
#
#   bash examples/recipes/llama3_8b.sh CHECKPOINT_PATH DATA_PREFIX [FLAG ...]
# MOCK as data trains on synthetic tokens; flags at the end replace those of the recipe. DRY_RUN=1
# in front starts nothing. Data and published speeds: examples/recipes/README.md.
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
# 128 x 8192 tokens a step. All states are sharded over the node (III on one node is ZeRO-3).
TRAINING_ARGS=(
    --paro-strategy III
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 10000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
)
# shellcheck source-path=SCRIPTDIR source=recipe.sh
source "$(dirname "$0")/recipe.sh"
