"""Where the program starts: until the command line is loaded, Ctrl-C just ends it."""

import os
import signal

from sm70_convert.errors import OUT_OF_MEMORY, OutputError, is_out_of_memory

# Made beforehand: there may be no memory left to make it, nor to end in good order.
_OUT_OF_MEMORY = "".join(f"{line}\n" for line in OutputError(OUT_OF_MEMORY).lines()).encode()


def main() -> None:
    """Runs the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default handler would print a traceback
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, which nothing here uses, take memory
    try:
        from sm70_convert.cli import main

        main()
    except (ImportError, MemoryError, SystemError) as exc:
        if not is_out_of_memory(exc):
            raise
        os.write(2, _OUT_OF_MEMORY)
        os._exit(OutputError.exit_code)


if __name__ == "__main__":
    main()
