#!/usr/bin/env bash
# TinyLlama: 1.1 billion parameters, LLaMA-2's tokenizer, 2 million tokens a step.
#
#   bash examples/recipes/tinyllama_1b.sh CHECKPOINT_PATH DATA_PREFIX [FLAG ...]
# MOCK as data trains on synthetic tokens; flags at the end replace those of the recipe. DRY_RUN=1
# in front starts nothing. Data, expected results and speed: examples/recipes/README.md.
#
# From the environment: TOKENIZER_MODEL (LLaMA-2's), GPUS_PER_NODE (8), NNODES (1), NODE_RANK,
# MASTER_ADDR, GPU_MEMORY_GB (42.4, what torch sees of an A100 of 40 GB).
set -euo pipefail

NAME=tinyllama_1b
GPU_MEMORY_GB=${GPU_MEMORY_GB:-42.4}
MOCK_VOCAB_SIZE=32000
TOKENIZER_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "${TOKENIZER_MODEL:-tokenizer.model}"
)
MODEL_ARGS=(
    --num-layers 22
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --seq-length 2048
    --untie-embeddings-and-output-weights
)
# 1024 x 2048 tokens a step; 50,000 steps are 105 billion tokens, its first published checkpoint.
# The rate falls over all 1.43 million steps. Optimizer states are sharded inside a node (NNI).
TRAINING_ARGS=(
    --paro-strategy NNI
    --micro-batch-size 4
    --global-batch-size 1024
    --train-iters 50000
    --lr 4.0e-4
    --min-lr 4.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 1430512
    --lr-warmup-iters 2000
)
# shellcheck source-path=SCRIPTDIR source=recipe.sh
source "$(dirname "$0")/recipe.sh"
