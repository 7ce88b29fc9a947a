"""The torchrun agent: the process that represents one of several nodes.

`python -m ttrain.engine.torchrun_agent TORCHRUN_ARGUMENT...`

It starts this node's ranks, forwards stop signals to them and waits for their checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from ttrain.core.machine import SAFE_PATH
from ttrain.core.signals import PARENT, STOP_SIGNALS, end_with_parent, heeded_signals
from ttrain.engine.stage_worker import set_up

log = logging.getLogger("ttrain")


def main() -> int:
    """Run the agent; return 1 if a rank failed. The ranks' result files say what happened."""
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))
    set_up()
    os.environ[PARENT] = str(os.getpid())
    os.environ |= SAFE_PATH  # torchrun starts the ranks without -P
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # in the ranks too, until they listen
    threading.Thread(target=_forward_signals, name="signals", daemon=True).start()
    from torch.distributed import run

    try:
        # torchrun's own handlers would end this agent, and the other nodes' agents would then wait 300 s for it.
        run.main(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    except BaseException as error:
        log.info("torchrun: %s", error.__class__.__name__)
        return 1
    return 0


def _forward_signals() -> None:
    """Forward stop signals to the ranks, which end cleanly; if there are none yet, end this process."""
    signals = heeded_signals()  # not the ignored ones: sigwait would return a blocked one all the same
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
