"""Trained heads in real serving engines, against the built-in decoder: `bash scripts/test_engines.sh` prepares and runs it."""

import sys

from scripts.bench.engines.check import main

if __name__ == "__main__":
    sys.exit(main())
