"""Train an EAGLE-1 (HASS) or EAGLE-3 head on the features of a recipe (made first if they are missing).

accelerate launch train/eagle.py --recipe recipes/eagle3/tiny.yaml
accelerate launch --config_file recipes/accelerate/ddp-8gpu.yaml train/eagle.py --recipe R --train.lr 2e-4
"""

import sys

from draftsmith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], script="eagle.py"))
