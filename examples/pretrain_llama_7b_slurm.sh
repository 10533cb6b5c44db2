#!/usr/bin/env bash
# Pre-trains LLaMA-7B on DGX nodes under SLURM: srun starts a process per GPU (NNI).
#
#   sbatch --nodes 4 examples/pretrain_llama_7b_slurm.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# from the repository's root, with the environment to train in active, or CONTAINER_IMAGE set to
# one made of examples/Dockerfile (SLURM needs pyxis for it). MOCK as tokenizer and data trains on
# synthetic tokens.
# DRY_RUN=1 NNODES=16 bash examples/pretrain_llama_7b_slurm.sh
# starts nothing and needs no SLURM: one plain process checks the whole command line for 16 nodes
# and says what a GPU would hold and send.
#
# GPUs are given to the node and not to the task: a rank picks its own by its number in the node.
# Five minutes before the time is over SLURM signals the ranks, which save and leave.
#SBATCH --job-name=llama-7b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --exclusive
#SBATCH --output=llama_7b_%j.log
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^#SBATCH/d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" # sbatch runs a copy from elsewhere

CHECKPOINT_PATH=${1:-checkpoints/llama_7b}
TENSORBOARD_LOGS_PATH=${2:-tensorboard_logs/llama_7b}
TOKENIZER_ARG=${3:-MOCK} # a SentencePiece .model, or MOCK
DATA_ARG=${4:-MOCK}      # PREFIX of PREFIX.bin and PREFIX.idx, or MOCK

GPUS_PER_NODE=${SLURM_NTASKS_PER_NODE:-${GPUS_PER_NODE:-8}}
NNODES=${SLURM_JOB_NUM_NODES:-${NNODES:-4}}
GPU_MEMORY_GB=${GPU_MEMORY_GB:-84.9} # what torch sees of an A100 or H100 of 80 GB; for the dry run

# Ranks, world size and ranks per node come from SLURM itself; where to meet does not.
if [[ -z ${MASTER_ADDR:-} && -n ${SLURM_JOB_NODELIST:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
fi
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-6000}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun sets it
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8} # srun does not take it over from sbatch

CONTAINER_ARGS=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    CONTAINER_ARGS=(
        --container-image "$CONTAINER_IMAGE"
        --container-mounts "${CONTAINER_MOUNTS:-$PWD:$PWD}" # data and checkpoints as well
        --container-workdir "$PWD"
    )
fi
LAUNCHER=(srun "${CONTAINER_ARGS[@]}" python -u)

# Megatron-LM's scripts set this to 1: then all streams of a GPU share one hardware queue, and
# communication no longer runs beside compute.
unset CUDA_DEVICE_MAX_CONNECTIONS
# Ranks that talk between nodes have the same number on theirs, as in PaRO: on a fabric with a rail
# per adapter their traffic need not leave its rail. On another fabric give NCCL_CROSS_NIC=2.
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-0}
# The rest is NCCL's choice, or the fabric's and belongs in /etc/nccl.conf of the nodes (on RoCE
# NCCL_IB_GID_INDEX, beside storage adapters NCCL_IB_HCA). AMSP's figures are without SHARP too.

# NNI: parameters and gradients whole on every GPU, optimizer state spread inside the node. Nothing
# is sent before the last micro-batch of a step, and what crosses nodes then is one sum that hides
# under its backward; updated parameters never cross. Where it fits it is the fastest: AMSP's search
# picks it for 7B and measures 51% MFU on 1024 GPUs, ZeRO-1 36%, MiCS 35%; PaRO measures 49% more
# than ZeRO-1 on 32. It takes the same memory on any number of nodes:
#
#   GPUs  strategy  micro-batch  GB of a GPU
#     16  NNI       2            63.7
#    128  NNI       2            63.7
#
# by the predictor (DRY_RUN=1 prints it by kind), of 76.4 that can be used. Of a GPU with 40 GB:
# PARO_STRATEGY=IIG, which takes 24.6 GB on 16 GPUs and 20.2 GB on 128.
PARO_ARGS=(
    --paro-strategy "${PARO_STRATEGY:-NNI}"
    --paro-group-size "$GPUS_PER_NODE"
)

MODEL_ARGS=(
    --llama-preset 7B
    --seq-length 2048
)

# LLaMA's recipe: 4 million tokens a batch, a trillion in all. A micro-batch of 2 x 2048 tokens
# fills an A100 (InternEvo measures 4,078 tokens/s on each of 8 GPUs with it, 3,625 on 1024).
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 2048
    --train-iters 238419
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --manual-gc
    --manual-gc-interval 100
)

# All activations fit. Where memory is short, recompute the inside of the first 16 blocks in
# backward, or of all:
#   RECOMPUTE_ARGS=(--recompute-granularity full --recompute-method block --recompute-num-layers 16)
#   RECOMPUTE_ARGS=(--recompute-granularity full)
RECOMPUTE_ARGS=()

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

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --save-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --exit-signal-handler
    --log-progress
    --flight-recorder-dir "$CHECKPOINT_PATH/flight_recorder"
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
    "${RECOMPUTE_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "${DRY_RUN_ARGS[@]}"
