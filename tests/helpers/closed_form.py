"""Closed-form traffic of the 14 letter strategies, as multiples of two volumes, from the paper."""

# Per rank, for a buffer of V bytes on n = m * ng ranks in groups of m:
#
#     X = (m - 1) / m * V             sent inside a group by a gather, or a reduce-scatter, of V
#     Y = (ng - 1) / ng * V / m       sent between groups by the same over all ranks, level by level
#
# An all-reduce costs twice that. Gathers for compute send all parameters; everything else sends
# the trained ones. Every parameter is gathered twice in a micro-batch, before forward and before
# backward; the step list of a run has less for an embedding and an untied head.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paro.strategy import is_legal
from paro.topology import Sent

Multiples = tuple[int, int]  # multiples of X, multiples of Y

GATHER: dict[str, Multiples] = {"N": (0, 0), "I": (2, 0), "G": (2, 2)}  # by params, per micro-batch
REDUCE: dict[str, Multiples] = {"N": (0, 0), "I": (1, 0), "G": (1, 1)}  # by grads, per micro-batch
GRAD_SYNC: dict[str, Multiples] = {  # by grads and optim, per step
    "NN": (2, 2),
    "NI": (1, 2),
    "NG": (1, 1),
    "II": (0, 2),
    "IG": (0, 1),
    "GG": (0, 0),
}
PARAM_ALL_GATHER: dict[str, Multiples] = {  # by params and optim, per step
    "NN": (0, 0),
    "NI": (1, 0),
    "NG": (1, 1),
    "II": (0, 0),
    "IG": (0, 1),
    "GG": (0, 0),
}


def letter_traffic(
    letters: str,
    *,
    params_bytes: int,
    trained_bytes: int,
    world_size: int,
    group_size: int,
    num_micro_batches: int,
) -> Sent:
    """Bytes a rank sends in one optimizer step, with one communication dtype for all states."""
    assert is_legal(letters), f"{letters} is not legal"
    params, grads, optim = tuple(letters)
    times = num_micro_batches
    gather = times * np.array(GATHER[params])
    once = np.array(GRAD_SYNC[grads + optim]) + PARAM_ALL_GATHER[params + optim]
    trained = times * np.array(REDUCE[grads]) + once

    def sent(num_bytes: int) -> NDArray[np.int64]:
        assert num_bytes % world_size == 0, f"{num_bytes} bytes on {world_size} ranks"
        x = num_bytes // group_size * (group_size - 1)
        y = num_bytes // world_size * (world_size // group_size - 1)
        return np.array((x, y))

    return Sent(*map(int, gather * sent(params_bytes) + trained * sent(trained_bytes)))
