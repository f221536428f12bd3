"""What torchrun starts in test_shared_stages.py and test_shared_evaluation.py: commands, one after the other, in the same processes.

python -m torch.distributed.run --nproc_per_node 2 -m tests.target.shared COMMANDS.json   # a list of lists of words

FAIL=N in the environment has rank N fail when it decodes its second group of prompts.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.eval.clocks import turns


def fail() -> None:
    """Have this process fail in the midst of decoding."""
    take, turn = turns._take, iter(range(9))

    def failing(*args: Any) -> Any:
        if next(turn) == 1:
            raise UserError("The second group of prompts is damaged: mend it.")
        return take(*args)

    turns._take = failing


if __name__ == "__main__":
    if os.environ.get("FAIL") == os.environ["RANK"]:
        fail()
    for words in json.loads(Path(sys.argv[1]).read_text()):
        if code := main(words):
            sys.exit(code)
