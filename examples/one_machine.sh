#!/usr/bin/env bash
# torchrun for the ranks of one machine, with every port on the loopback interface:
#
#   bash examples/one_machine.sh --nproc-per-node 8 pretrain_llama.py ...
#
# `torchrun --standalone` opens ports without authentication on all interfaces: whoever reaches one
# can run code as the user. Here the agent meets its ranks in a file of the user's alone, rank 0
# opens the ranks' store on 127.0.0.1, and gloo and NCCL connect there.
#
# It ends as the ranks do, with their exit status and their last lines: status 0 if they saved at
# SIGTERM or Ctrl-C (--exit-signal-handler). A second signal, a second later, kills them.
set -euo pipefail
[[ ${1:-} != @(-h|--help) ]] || { sed '1d; /^[^#]/,$d; s/^# \{0,1\}//' "$0"; exit; }

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # no store of the agent's for the ranks
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun sets it, with a warning

exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/torchrun.py" \
    --rdzv-backend c10d \
    --rdzv-conf store_type=file \
    --rdzv-endpoint "$(mktemp)" \
    --rdzv-id "$(cat /proc/sys/kernel/random/uuid)" \
    --local-addr 127.0.0.1 \
    "$@"
