"""`python -m scripts.bench.faults`: kill runs and spoil their files, and count what is different afterwards."""

import sys

from scripts.bench.faults.bench import main

sys.exit(main(sys.argv[1:]))
