"""Entry point of `python -m tfdp` and of the command `tfdp`."""

from __future__ import annotations

import signal


def start() -> None:
    """Run the command line.

    Until the imports are complete, Ctrl-C kills the process: a `KeyboardInterrupt` in
    the middle of an import may be swallowed, and the job would start.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tfdp.launch.cli.main import main

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    start()
