"""The program `ttrain`, also as `python -m ttrain`."""

import gc
import os
import signal
import sys
import time
from types import FrameType

# Allocated objects between two searches for cycles that nothing uses, 700 by default: a cached run takes 0.48 s instead of
# 0.52, and loading torch with transformers 4.0 s instead of 4.6, since what is loaded stays.
GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command line. Ctrl-C ends the program without a traceback also while it is loaded, for 0.3 s, and while
    Python ends. SIGTERM and SIGHUP let a command that has no handlers of its own remove its temporary files."""
    gc.set_threshold(GC_THRESHOLD)
    # Not where a shell put it into the background.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ttrain.cli import main as command_line
    from ttrain.core.signals import SAME_SIGNAL_SECONDS

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    received: list[int] = []
    since = 0.0

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        if received:
            if time.monotonic() - since > SAME_SIGNAL_SECONDS:  # else `timeout` sent one signal twice
                os._exit(128 + signum)
            return
        received.append(signum)
        since = time.monotonic()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # kernel and shell both send it
        sys.exit(128 + signum)

    # Under nohup SIGHUP is ignored, and stays so.
    heeded = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in heeded:
        signal.signal(signum, end)
    try:
        command_line.main()
    finally:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for signum in heeded:
            if signal.getsignal(signum) is end:
                signal.signal(signum, signal.SIG_DFL)
        if received:  # also where a library makes another error of it; without the seconds in which Python takes torch down
            os._exit(128 + received[0])


if __name__ == "__main__":
    main()
