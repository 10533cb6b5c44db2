#!/usr/bin/env bash
# Trains a small LLaMA on CPU ranks that are nodes of their own, with slow links between them.
#
# Needs root and iproute2: every node is a network namespace, every rank has a NIC that the kernel
# holds to a rate. Shows what a strategy sends, and what it costs, without a GPU:
#   sudo --preserve-env=PATH bash examples/cpu_emulated_cluster.sh
#   STRATEGY=GGG COLLECTIVE=ring sudo --preserve-env=PATH,STRATEGY,COLLECTIVE bash ...
# DRY_RUN=1 in front needs no root, makes no cluster and starts nothing: one plain process checks
# the command line and says what a rank would hold and send.
#
# Flags after it go to the run, after its own, such as --seq-length 256.
#
# From the environment:
#   NNODES, RANKS_PER_NODE  how many of each (2, 4)
#   INTER                   the rate of a NIC (100mbit)
#   STRATEGY, COLLECTIVE    what to try (IIG, ho-ring)
#   TRAIN_ITERS             optimizer steps (20)
#   CLUSTER                 its name, where there are several (example)
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."

NNODES=${NNODES:-2}
RANKS_PER_NODE=${RANKS_PER_NODE:-4}
INTER=${INTER:-100mbit}
CLUSTER=${CLUSTER:-example}
WORLD_SIZE=$((NNODES * RANKS_PER_NODE))

# A group is a node, as on real clusters: its ranks share a loopback, which is not slowed down.
PARO_ARGS=(
    --distributed-backend gloo
    --paro-strategy "${STRATEGY:-IIG}"
    --paro-group-size "$RANKS_PER_NODE"
    --paro-collective "${COLLECTIVE:-ho-ring}"
)

# 6.6 million parameters: 13.2 MB in bf16, which take a NIC of 100 Mbit/s a second.
MODEL_ARGS=(
    --num-layers 6
    --hidden-size 256
    --num-attention-heads 4
    --seq-length 128
    --untie-embeddings-and-output-weights
)

# Four micro-batches a step: what crosses nodes once a step is sent once for all of them.
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $((4 * WORLD_SIZE))
    --train-iters "${TRAIN_ITERS:-20}"
    --lr 0.001
    --bf16
)

DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 4096
    --num-workers 0
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-iters 0
)

COMMAND=(
    pretrain_llama.py
    "${PARO_ARGS[@]}"
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${EVAL_AND_LOGGING_ARGS[@]}"
    "$@"
)
if [[ -n ${DRY_RUN:-} ]]; then
    exec python "${COMMAND[@]}" \
        --dry-run --world-size "$WORLD_SIZE" --ranks-per-node "$RANKS_PER_NODE"
fi

cluster() {
    local command=$1
    shift
    python tools/emulated_cluster.py "$command" --name "$CLUSTER" "$@"
}

cluster up --nodes "$NNODES" --ranks-per-node "$RANKS_PER_NODE" --inter "$INTER"
trap 'cluster down' EXIT
cluster run -- "${COMMAND[@]}"
cluster bytes # what crossed the links, headers included
