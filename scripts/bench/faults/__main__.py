"""`python -m scripts.bench.faults --kills 120 --random 80`: kill runs and spoil their files, and count what is different afterwards."""

import sys

from scripts.bench.faults.bench import main

sys.exit(main(sys.argv[1:]))
