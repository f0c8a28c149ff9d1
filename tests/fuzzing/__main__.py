"""`python -m tests.fuzzing`: a million inputs for every parser; what breaks the promise goes into the corpus."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzzing.harness import fuzz, keep
from tests.fuzzing.parsers import PARSERS


def main() -> int:
    given = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    given.add_argument("parsers", nargs="*", help=f"of {', '.join(PARSERS)}; all by default")
    given.add_argument("--inputs", type=int, default=1_000_000, help="inputs a parser [1000000]")
    given.add_argument("--seconds", type=float, default=float("inf"), help="processor time a parser at most")
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--dry", action="store_true", help="leave the corpus as it is")
    options = given.parse_args()
    broken = 0
    for name in options.parsers or PARSERS:
        began = time.process_time()
        outcome = fuzz(name, options.inputs, seed=options.seed, seconds=options.seconds)
        took = time.process_time() - began
        said = f"{outcome.tried:9} inputs {outcome.accepted:8} accepted {took:7.1f} s"
        print(f"{name:14}{said} {len(outcome.broken):4} kinds broken", flush=True)
        for kind, content in outcome.broken.items():
            broken += 1
            place = "" if options.dry else f" -> {keep(name, content)}"
            print(f"    {kind}{place}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
