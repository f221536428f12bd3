"""Check trained heads in real serving engines; `bash scripts/test_engines.sh` prepares and runs it."""

from scripts.bench.engines.check import main

if __name__ == "__main__":
    raise SystemExit(main())
