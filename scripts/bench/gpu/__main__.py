"""Check a CUDA machine; `bash scripts/gpu_check.sh` finds a Python and runs it."""

from scripts.bench.gpu.check import main

if __name__ == "__main__":
    raise SystemExit(main())
