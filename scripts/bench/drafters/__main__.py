"""Compare every drafter on one target, data and budget: `python -m scripts.bench.drafters --store DIR --runs DIR`."""

from scripts.bench.drafters.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
