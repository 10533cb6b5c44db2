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

MODEL=7B
LAUNCH=srun
NNODES=${SLURM_JOB_NUM_NODES:-${NNODES:-4}}
FOLDER=${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/examples} # this one: sbatch runs a copy elsewhere
# shellcheck source-path=SCRIPTDIR source=pretrain_llama.sh
source "${FOLDER:-$(dirname "$0")}/pretrain_llama.sh"
