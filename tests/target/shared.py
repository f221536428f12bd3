"""What torchrun starts in test_shared_stages.py: commands, one after the other, in the same processes.

python -m torch.distributed.run --nproc_per_node 2 -m tests.target.shared COMMANDS.json   # a list of lists of words
"""

import json
import sys
from pathlib import Path

from draftsmith.cli.main import main

if __name__ == "__main__":
    for words in json.loads(Path(sys.argv[1]).read_text()):
        if code := main(words):
            sys.exit(code)
