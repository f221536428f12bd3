"""The built-in decoder beside others, in one run: `python -m scripts.bench.decoder --recipe R --batch 1 --batch 8 --output DIR`."""

import sys

from scripts.bench.decoder.bench import main

if __name__ == "__main__":
    sys.exit(main())
