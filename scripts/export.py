"""Write a trained head as an engine reads it: `python scripts/export.py --help`, the same as `draftsmith export`."""

import sys

from draftsmith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
