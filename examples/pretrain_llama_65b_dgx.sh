#!/usr/bin/env bash
# Pre-trains LLaMA-65B on DGX nodes with torchrun: all states spread, blocks recomputed (IIG).
#
# Run it on every node:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash examples/pretrain_llama_65b_dgx.sh \
#       CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_MODEL DATA_PREFIX
# MOCK as tokenizer and data trains on synthetic tokens.
# SURVIVE=1 in front lets the run continue from memory after it has lost a node: docs/recovery.md.
# DRY_RUN=1 NNODES=16 in front starts nothing: one plain process, on any machine, checks the whole
# command line for 16 nodes and says what a GPU would hold and send.
set -euo pipefail

MODEL=65B
LAUNCH=torchrun
NNODES=${NNODES:-8}
# shellcheck source-path=SCRIPTDIR source=pretrain_llama.sh
source "$(dirname "$0")/pretrain_llama.sh"
