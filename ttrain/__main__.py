"""The program `ttrain`, also as `python -m ttrain`."""

import gc
import signal

# Allocated objects between two searches for cycles that nothing uses, 700 by default: a cached run takes 0.48 s instead of
# 0.52, and loading torch with transformers 4.0 s instead of 4.6, since what is loaded stays.
GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command line. Ctrl-C ends the program without a traceback also while it is loaded, for 0.3 s, and while
    Python ends."""
    gc.set_threshold(GC_THRESHOLD)
    # Not where a shell put it into the background.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ttrain.cli import main as command_line

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command_line.main()
    finally:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
