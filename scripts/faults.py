"""Faults that a run must survive or end well with, made in earnest. Linux only.

    python scripts/faults.py strike                            # every fault once: built-in model, two CPU ranks
    python scripts/faults.py strike --device cuda --tp 2 --only "kill rank" "out of memory"
    python scripts/faults.py kill --kills 200 --seed 7         # kills at random moments
    python scripts/faults.py lose-power --states 100000        # a power loss at every system call

`--help` behind a name says more. The exit code is 1 where something did not end as it should.
"""

from __future__ import annotations

import argparse
import sys

import fault_kills
import fault_power_loss
import fault_strikes

TOOLS = {"strike": fault_strikes, "kill": fault_kills, "lose-power": fault_power_loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="name", required=True)
    for name, tool in TOOLS.items():
        tool.add_options(
            names.add_parser(name, description=tool.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        )
    options = parser.parse_args()
    sys.exit(TOOLS[options.name].run(options))


if __name__ == "__main__":
    main()
