#!/usr/bin/env bash
# A LLaMA of 7.3 billion parameters, with the schedule, z-loss and weight decay of OLMo-2-7B.
#
#   bash examples/recipes/olmo2_7b.sh CHECKPOINT_PATH DATA [FLAG ...]
# DATA is the prefix of a corpus, a .json file of --data-phases, or MOCK for synthetic tokens; flags
# at the end replace those of the recipe. DRY_RUN=1 in front starts nothing. Sources, and the
# differences from OLMo-2's model: examples/recipes/README.md.
#
# From the environment: STAGE (1, or 2 for the last 50 billion tokens, in the same folder),
# TOKENIZER_MODEL (a folder with tokenizer.json), VALID_DATA (a prefix, for phases), GPUS_PER_NODE
# (8), NNODES (1), NODE_RANK, MASTER_ADDR, GPU_MEMORY_GB (84.9).
set -euo pipefail

NAME=olmo2_7b
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9}
MOCK_VOCAB_SIZE=100278
TOKENIZER_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${TOKENIZER_MODEL:-dolma2-tokenizer}"
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --rotary-base 500000
    --norm-epsilon 1.0e-6
    --qk-layernorm
    --untie-embeddings-and-output-weights
    --seq-length 4096
)
# 1024 x 4096 tokens a step. Stage 1 ends at step 928,646 of a cosine over 5 trillion tokens; in
# stage 2 the rate falls from there to 0 in a line. All states are sharded over the node (III).
TRAINING_ARGS=(
    --paro-strategy III
    --micro-batch-size 2
    --global-batch-size 1024
    --z-loss-weight 1.0e-5
    --param-group "names:embedding.weight wd-mult=0" "names:*norm* wd-mult=1"
)
if [[ ${STAGE:-1} == 1 ]]; then
    TRAINING_ARGS+=(
        --train-iters 928646
        --lr 3.0e-4
        --min-lr 3.0e-5
        --lr-decay-style cosine
        --lr-decay-iters 1192093
        --lr-warmup-iters 2000
    )
else
    TRAINING_ARGS+=(
        --train-iters 940567
        --lr 6.1499e-5
        --min-lr 0
        --lr-decay-style WSD
        --lr-wsd-decay-style linear
        --lr-wsd-decay-iters 11921
        --override-opt_param-scheduler
    )
fi
# shellcheck source-path=SCRIPTDIR source=recipe.sh
source "$(dirname "$0")/recipe.sh"
