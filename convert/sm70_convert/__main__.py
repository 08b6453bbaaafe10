"""Where the program starts: until the command line is loaded, Ctrl-C just ends it."""

import signal


def main() -> None:
    """Runs the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default handler would print a traceback
    from sm70_convert.cli import main

    main()


if __name__ == "__main__":
    main()
