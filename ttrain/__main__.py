"""The program `ttrain`, also as `python -m ttrain`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C ends the program without a traceback also while it is loaded, for 0.3 s, and while
    Python ends."""
    is_interruptible = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # not where a shell put it into the background
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
