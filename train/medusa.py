"""Train Medusa heads on the features of a recipe (made first if they are missing).

accelerate launch train/medusa.py --recipe recipes/medusa/tiny.yaml
accelerate launch --config_file recipes/accelerate/ddp-8gpu.yaml train/medusa.py --recipe R --train.lr 2e-4
"""

import sys

from draftsmith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]], script="medusa.py"))
