"""The process that stands for one of several nodes, torchrun's agent.

`python -m ttrain.pipeline.torchrun_agent TORCHRUN_ARGUMENT...`

It starts this node's ranks, passes a signal to stop on to them and waits for their checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from ttrain.core.parent_process import PARENT, STOP_SIGNALS, end_with_parent, heeded_signals
from ttrain.pipeline.stage_worker import set_up

log = logging.getLogger("ttrain")


def main() -> int:
    """Be the agent; 1 where a rank failed. The ranks' result files tell what happened."""
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))
    set_up()
    os.environ[PARENT] = str(os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # in the ranks too, until they listen
    threading.Thread(target=_pass_on, name="signals", daemon=True).start()
    from torch.distributed import run

    try:
        # Its own handlers would take the agent away, for which the other nodes' agents then wait 300 s.
        run.main(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    except BaseException as error:
        log.info("torchrun: %s", error.__class__.__name__)
        return 1
    return 0


def _pass_on() -> None:
    """Signals to stop, to the ranks, which end in good order; where there are none yet, this process ends."""
    signals = heeded_signals()  # an ignored one that is blocked would be waited for, too
    while True:
        signum = signal.sigwait(signals)
        ranks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not ranks:
            os._exit(128 + signum)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rank), signum)


if __name__ == "__main__":
    sys.exit(main())
