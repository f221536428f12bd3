"""`python -m scripts.bench.mutants`: which of the core's mutants do its tests miss?"""

from scripts.bench.mutants.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
