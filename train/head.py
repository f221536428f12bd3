"""Train the head of any recipe, whatever its method, on its features (made first if they are missing).

accelerate launch train/head.py --recipe recipes/eagle3/tiny.yaml
accelerate launch --config_file recipes/accelerate/ddp-8gpu.yaml train/head.py --recipe R --train.lr 2e-4
"""

import sys

from draftsmith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
