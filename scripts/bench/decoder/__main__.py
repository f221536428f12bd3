"""Compare the decoder with others: `python -m scripts.bench.decoder --recipe R --batch 1 --batch 8 --output DIR`."""

from scripts.bench.decoder.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
