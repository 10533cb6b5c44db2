#!/usr/bin/env bash
# A LLaMA of 125 million parameters on 1.0 billion tokens of FineWeb, for a first curve to compare.
#
#   bash examples/recipes/llama_125m.sh CHECKPOINT_PATH DATA_PREFIX [FLAG ...]
# MOCK as data trains on synthetic tokens; flags at the end replace those of the recipe. DRY_RUN=1
# in front starts nothing. Data, expected loss and speed: examples/recipes/README.md.
#
# From the environment: OPTIMIZER (adam, or muon for the matrices of blocks), VOCAB_FILE and
# MERGE_FILE (GPT-2's), GPUS_PER_NODE (8), NNODES (1), NODE_RANK, MASTER_ADDR, GPU_MEMORY_GB (84.9).
set -euo pipefail

NAME=llama_125m
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9}
MOCK_VOCAB_SIZE=50257
TOKENIZER_ARGS=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "${VOCAB_FILE:-vocab.json}"
    --merge-file "${MERGE_FILE:-merges.txt}"
)
MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
    --ffn-hidden-size 2048
    --num-attention-heads 12
    --seq-length 1024
    --tie-embeddings-and-output-weights
)
# 512 x 1024 tokens a step; the rate is constant until the last 40% of 1,907 steps. States are so
# small that none is sharded (NNN).
TRAINING_ARGS=(
    --paro-strategy NNN
    --micro-batch-size 32
    --global-batch-size 512
    --train-iters 1907
    --lr 1.5e-3
    --lr-warmup-iters 250
    --lr-decay-style WSD
    --lr-wsd-decay-style linear
    --lr-wsd-decay-iters 763
    --min-lr 0
    --optimizer "${OPTIMIZER:-adam}"
)
# Muon's updates are as large as AdamW's, so the rate stays. Its states are sharded inside a node
# (NNI), so that a rank updates its share of the matrices.
if [[ ${OPTIMIZER:-} == muon ]]; then
    TRAINING_ARGS+=(
        --paro-strategy NNI
        --muon-momentum 0.95
        --muon-nesterov
        --muon-extra-scale-factor 0.2
    )
fi
# shellcheck source-path=SCRIPTDIR source=recipe.sh
source "$(dirname "$0")/recipe.sh"
