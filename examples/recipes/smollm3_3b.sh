#!/usr/bin/env bash
# A LLaMA of 3.1 billion parameters, with the schedule, phases and weight decay of SmolLM3-3B.
#
#   bash examples/recipes/smollm3_3b.sh CHECKPOINT_PATH DATA [FLAG ...]
# DATA is a .json file of --data-phases, the prefix of one corpus, or MOCK for synthetic tokens;
# flags at the end replace those of the recipe. DRY_RUN=1 in front starts nothing. Sources, phases,
# and the differences from SmolLM3's model: examples/recipes/README.md.
#
# From the environment: TOKENIZER_MODEL (a folder with tokenizer.json), VALID_DATA (a prefix, for
# phases), GPUS_PER_NODE (8), NNODES (1), NODE_RANK, MASTER_ADDR, GPU_MEMORY_GB (84.9).
set -euo pipefail

NAME=smollm3_3b
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9}
MOCK_VOCAB_SIZE=128256
TOKENIZER_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${TOKENIZER_MODEL:-SmolLM3-3B-Base}"
)
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 2048
    --ffn-hidden-size 11008
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --rotary-base 50000
    --norm-epsilon 1.0e-6
    --tie-embeddings-and-output-weights
    --reset-attention-mask
    --reset-position-ids
    --seq-length 4096
)
# 576 x 4096 tokens a step; the rate is constant until the last tenth, then falls to 0 in a line.
# Optimizer states are sharded inside a node (NNI).
TRAINING_ARGS=(
    --paro-strategy NNI
    --micro-batch-size 2
    --global-batch-size 576
    --train-iters 4720000
    --lr 2.0e-4
    --min-lr 0
    --lr-warmup-iters 2000
    --lr-decay-style WSD
    --lr-wsd-decay-style linear
    --lr-wsd-decay-iters 472000
    --param-group "names:embedding.weight wd-mult=0"
)
# shellcheck source-path=SCRIPTDIR source=recipe.sh
source "$(dirname "$0")/recipe.sh"
