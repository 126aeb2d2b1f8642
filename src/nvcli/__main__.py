"""`nvcli`, and `python -m nvcli`."""

from __future__ import annotations

import signal


def main() -> None:
    """The command. While it is loaded Ctrl-C ends it without a word: nothing has begun that could be lost."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nvcli.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
