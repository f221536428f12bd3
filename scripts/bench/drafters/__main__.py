"""Every drafter on the same target, data and budget: `python -m scripts.bench.drafters --store DIR --runs DIR`."""

import sys

from scripts.bench.drafters.bench import main

if __name__ == "__main__":
    sys.exit(main())
