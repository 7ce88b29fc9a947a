"""The process that stands for one of several nodes: `python -m ttrain.agent TORCHRUN_ARGUMENT...`, torchrun's agent.

It starts this node's ranks, passes a SIGTERM on to them and waits for their checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from ttrain.parent import PARENT, STOP_SIGNALS, end_with_parent
from ttrain.worker import set_up

log = logging.getLogger("ttrain")


def main() -> int:
    """Be the agent; 1 where a rank failed. The ranks' result files tell what happened."""
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))
    set_up()
    os.environ[PARENT] = str(os.getpid())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    from torch.distributed import run

    try:
        run.main(sys.argv[1:])
    except BaseException as error:
        log.info("torchrun: %s", error.__class__.__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
