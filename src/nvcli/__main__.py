"""Entry point of `nvcli` and `python -m nvcli`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command. While it is being imported, Ctrl-C ends it silently: there is no work to lose yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nvcli.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
