"""One node of a cluster: torchrun, which ends with the status of the first rank that failed."""

# A separate script, started by launch.py in the node's network namespace. It differs from torchrun
# in three ways. torchrun turns every status into 1, but a user's mistake is a 2. torchrun's node 0
# may exit while others still ask its store whether all have finished, and they print long errors:
# here it stays until launch.py closes its standard input. And ranks have no standard input.

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

# Until torchrun handles signals itself they end this process, without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from torch.distributed import TCPStore  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.run import parse_args, run  # noqa: E402


def main(argv: Sequence[str]) -> int:
    args = parse_args(list(argv))
    leave = os.dup(sys.stdin.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    store = None
    try:
        if args.node_rank == 0:
            # With multi_tenant this is the store that torchrun is about to open, kept open.
            store = TCPStore(
                args.master_addr,
                args.master_port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
            )
        run(args)
        os.read(leave, 1)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"rank {rank} ended with status {status}", file=sys.stderr, flush=True)
        return status
    except SignalException as ended:
        return 128 + ended.sigval
    finally:
        del store
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
