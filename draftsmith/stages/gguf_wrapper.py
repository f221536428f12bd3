"""Run llama.cpp's converter with a named pre-tokenizer, where it does not recognise the tokenizer.

    python gguf_wrapper.py TREE NAME [OPTIONS OF convert_hf_to_gguf.py]

The converter recognises a tokenizer by a hash of its output for one text, and refuses unknown ones. draftsmith.stages.gguf
starts this file.
"""

import importlib
import sys
from typing import Any


def main() -> None:
    """Let `TextModel.get_vocab_base_pre` return NAME, then do what the converter does."""
    tree, name, *options = sys.argv[1:]
    # Python put this file's folder first, where "gguf" would be another module than the tree's.
    sys.path[0] = tree
    sys.argv = ["convert_hf_to_gguf.py", *options]
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    # Older trees hold the classes in the script itself.
    models = converter if hasattr(converter, "TextModel") else importlib.import_module("conversion.base")
    models.TextModel.get_vocab_base_pre = lambda self, tokenizer: name
    converter.main()


if __name__ == "__main__":
    main()
