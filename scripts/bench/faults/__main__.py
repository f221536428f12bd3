"""`python -m scripts.bench.faults`: kill runs and spoil their files, and count what is different afterwards.

python -m scripts.bench.faults --kills 120 --random 80
python -m scripts.bench.faults refusals               # what the worst mistakes cost
"""

import sys

from scripts.bench.faults import bench, refusals

if sys.argv[1:2] == ["refusals"]:
    sys.exit(refusals.main(sys.argv[2:]))
sys.exit(bench.main(sys.argv[1:]))
