"""A layout as another package would bring it: the table of tests/toy_drafter.py in fp16, bf16 or fp32, and its dtype."""

from pathlib import Path

from safetensors.torch import load_file

from draftsmith.heads.files import read_config
from draftsmith.heads.formats.layout import Layout
from draftsmith.heads.formats.schema import Schema, TensorRow
from draftsmith.target.target import Target
from tests.toy_drafter import BigramHead, BigramOptions, build

SCHEMA = Schema(
    name="bigram_table",
    tensors=(TensorRow("table"),),
    keys={"vocab_size": lambda export: len(export.head.table)},  # the reader makes the table of it
)


def load(path: Path, target: Target) -> BigramHead:
    head = build(BigramOptions(), target, None)
    assert read_config(path)["vocab_size"] == target.vocab_size
    head.load_state_dict({name: value.float() for name, value in load_file(path / "model.safetensors").items()})
    return head.requires_grad_(False)


LAYOUTS = (Layout("bigram", SCHEMA, load, engines={}),)
