#!/usr/bin/env bash
# Trains adapters (LoRA) of rank 16 on LLaMA-65B, on DGX nodes with torchrun (ING).
#
# Run it on every node:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/finetune_llama_65b_lora_dgx.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX BASE_PATH
# BASE_PATH is the model in this project's format, from tools/convert_checkpoint.py; the adapters go
# to CHECKPOINT_PATH, from which the same command continues. MOCK as tokenizer and data trains on
# synthetic tokens, MOCK as base on random weights. DRY_RUN=1 NNODES=16 in front starts nothing: it
# checks the command line for 16 nodes, on any machine, and says what a GPU would hold and send.
#
# From the environment: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, GPUS_PER_NODE (8), TRAIN_ITERS,
# GPU_MEMORY_GB (84.9).
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "$(dirname "$0")/.."

CHECKPOINT_PATH=${1:-checkpoints/llama_65b_lora}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_65b_lora}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK
BASE_PATH=${5:-MOCK}     # a folder of checkpoints, or MOCK
NNODES=${NNODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9} # what torch sees of an A100 or H100 of 80 GB; for the dry run

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)
LAUNCHER=(torchrun "${DISTRIBUTED_ARGS[@]}")

# As in pretrain_llama.sh, which has the reasons.
unset CUDA_DEVICE_MAX_CONNECTIONS
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-0}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# ING: the frozen weights are sharded in the node, so that gathers stay on its fast links; gradients
# of the adapters, 0.3% of the parameters, are on every GPU, and only they are sent between nodes,
# once a step. PaRO picks ING for such training, at 1.44 times the throughput of ZeRO-3.
#
#   GPUs  strategy  micro-batch  GB of a GPU
#      8  ING       2            31.3
#     16  ING       2            32.6
#     32  ING       2            32.6
#    128  ING       2            32.5
#
# by the predictor (DRY_RUN=1 prints it by kind), of 84.9.
PARO_ARGS=(
    --paro-strategy "${PARO_STRATEGY:-ING}"
    --paro-group-size "$GPUS_PER_NODE"
)

MODEL_ARGS=(
    --llama-preset 65B
    --seq-length 2048
    --lora-rank 16
    --lora-alpha 32
    --lora-dropout 0.05
    --lora-target-modules all-linear
)

TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 256
    --train-iters "${TRAIN_ITERS:-1000}"
    --lr 1.0e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.03
    --weight-decay 0.0
    --clip-grad 1.0
    --bf16
    --recompute-granularity full
    --manual-gc
    --manual-gc-interval 100
)

if [[ $TOKENIZER_ARG == MOCK || $DATA_ARG == MOCK ]]; then
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
    )
else
    DATA_ARGS=(
        --data-path "$DATA_ARG"
        --split "989,10,1"
        --tokenizer-type Llama2Tokenizer
        --tokenizer-model "$TOKENIZER_ARG"
    )
fi

# A run that has saved continues; another begins with the base.
LOAD=$BASE_PATH
if [[ $LOAD == MOCK || -e $CHECKPOINT_PATH/latest_checkpointed_iteration.txt ]]; then
    LOAD=$CHECKPOINT_PATH
fi

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 100
    --eval-iters 10
    --save-interval 100
    --save "$CHECKPOINT_PATH"
    --load "$LOAD"
    --exit-signal-handler
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
    --metrics-file "$CHECKPOINT_PATH/metrics.jsonl"
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

exec "${LAUNCHER[@]}" pretrain_llama.py \
    "${PARO_ARGS[@]}" \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${DRY_RUN_ARGS[@]}"
