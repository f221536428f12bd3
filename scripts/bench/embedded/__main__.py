"""Trains the target that data/embedded/ ships, about four minutes on two cores: `python -m scripts.bench.embedded`."""

import sys

from scripts.bench.embedded.make import main

if __name__ == "__main__":
    sys.exit(main())
