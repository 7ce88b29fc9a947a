"""The program `ttrain`, also as `python -m ttrain`."""

import gc
import signal
import sys
from types import FrameType

# Allocated objects between two searches for cycles that nothing uses, 700 by default: a cached run
# takes 0.48 s instead of 0.52, and loading torch with transformers 4.0 s instead of 4.6, since what
# is loaded stays.
GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command line; on SIGTERM and SIGHUP commands still remove temporary files."""
    gc.set_threshold(GC_THRESHOLD)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # SIGHUP stays ignored under nohup.
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _end)
    from ttrain.cli import main as command_line

    command_line.main()


def _end(signum: int, frame: FrameType | None) -> None:
    # `timeout`, systemd and the kernel send them twice.
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
