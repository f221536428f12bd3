"""What torchrun starts in test_two_processes.py: several trainings in one pair of processes, which saves their starts.

several.py FOLDER METHOD ...      # FOLDER/METHOD is a TinyRun, whose run "two" is trained
"""

import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState

from draftsmith.cli.main import main
from tests.train.runs import TinyRun

if __name__ == "__main__":
    folder, *methods = sys.argv[1:]
    codes = []
    for method in methods:
        # Checkpoints all the time: the processes must agree on when.
        words = [*TinyRun(Path(folder) / method, method).words("two"), "--train.checkpoint_minutes", "0.001"]
        codes.append(main(["train", *words]))
        AcceleratorState._reset_state()
        GradientState._reset_state()
    PartialState().wait_for_everyone()
    # Gloo often aborts while the interpreters exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(max(codes))
