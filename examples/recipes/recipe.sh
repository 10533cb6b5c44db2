#!/usr/bin/env bash
# The core of the recipes: launch, data and what is logged and saved.
#
# Not a script to start: a recipe sets NAME, MODEL_ARGS, TRAINING_ARGS, TOKENIZER_ARGS (for real
# text) and MOCK_VOCAB_SIZE, and sources this file from its own folder.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

CHECKPOINT_PATH=${1:-checkpoints/${NAME:?is set by the recipes that source this file}}
DATA_ARG=${2:-MOCK} # PREFIX of PREFIX.bin and PREFIX.idx, a .json file of --data-phases, or MOCK
OTHER_ARGS=("${@:3}")
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

if [[ $DATA_ARG == MOCK ]]; then
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
        --vocab-size "$MOCK_VOCAB_SIZE"
    )
elif [[ $DATA_ARG == *.json ]]; then
    DATA_ARGS=(
        --data-phases "$DATA_ARG"
        "${TOKENIZER_ARGS[@]}"
    )
    # Phases have training data alone.
    if [[ -n ${VALID_DATA:-} ]]; then
        DATA_ARGS+=(--valid-data-path "$VALID_DATA")
    else
        TRAINING_ARGS+=(--eval-iters 0)
    fi
else
    DATA_ARGS=(
        --data-path "$DATA_ARG"
        --split "998,2,0"
        "${TOKENIZER_ARGS[@]}"
    )
fi

# The same in all of them.
TRAINING_ARGS+=(
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 250
    --eval-iters 20
    --save-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --exit-signal-handler
    --tensorboard-dir "$CHECKPOINT_PATH/board"
    --metrics-file "$CHECKPOINT_PATH/metrics.jsonl"
)

LAUNCHER=(
    torchrun
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)
DRY_RUN_ARGS=()
if [[ -n ${DRY_RUN:-} ]]; then
    LAUNCHER=(python)
    DRY_RUN_ARGS=(
        --dry-run
        --world-size $((NNODES * GPUS_PER_NODE))
        --ranks-per-node "$GPUS_PER_NODE"
        --device-memory-gb "$GPU_MEMORY_GB"
    )
fi

unset CUDA_DEVICE_MAX_CONNECTIONS # 1 would keep communication from overlapping with compute
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
exec "${LAUNCHER[@]}" pretrain_llama.py \
    "${MODEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DRY_RUN_ARGS[@]}" \
    "${OTHER_ARGS[@]}"
