"""Domino heads for engines: the layout of SpecForge and SGLang, reading it, and how such heads are recognised."""

from pathlib import Path

from draftsmith.heads.block import formats as block
from draftsmith.heads.domino.head import DominoHead
from draftsmith.heads.files import explain_config
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.recognise import Format
from draftsmith.target.target import Target

_OPTIONS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")


def load_domino_directory(path: Path | str, target: Target) -> DominoHead:
    """Return the head in a directory of the Domino layout, ours or another's, fp32, on the target's device.

    Raises UserError as `load_dflash_directory` does.
    """
    path = Path(path)
    config = block.read_block_config(path, target, "projector_type", "shift_label", *_OPTIONS, from_anchor=True)
    if config.get("projector_type") != "domino":
        raise block.not_computed(path, "another projector_type than domino")
    # What SpecForge takes where they are left out.
    config = {"pure_draft_prefix_len": 0, "shift_label": False} | config
    more = block.read_sizes(path, config, "Domino", *_OPTIONS)
    with explain_config(path, "Domino head", "fetch the head again"):
        if not isinstance(config["shift_label"], bool):
            raise TypeError("shift_label is true or false")
    return block.load_block(path, config, target, DominoHead, **more, shift_label=config["shift_label"])


DOMINO = block.block_schema(
    "domino",
    "DFlashDraftModel",
    tensors=("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"),
    keys={"is_causal": False},
    section={"projector_type": "domino", **block.option_keys("shift_label", *_OPTIONS)},
)

_SGLANG = Served(
    engines.start_sglang("DFLASH"),
    rules=(
        block.whole_vocabulary("Domino", "corrects the logits of the target's whole vocabulary"),
        Rule(
            "another head.pure_draft_prefix_len than 1",
            "corrects from the second token on",
            "train with 1",
            lambda files, target, head: head.options.pure_draft_prefix_len != 1,
        ),
        block.bare_matrix("Domino"),
        block.no_embeddings("Domino"),
        block.own_embeddings("Domino", block.MEASURE_ALONE),
    ),
    caveats=(
        "SGLang runs Domino on CUDA alone, with target and head in bfloat16 (`--dtype bfloat16` where config.json says another). The root counts: a block of B slots is B draft "
        "tokens, of which B - 1 are drafted, also where the last slot could draft one more (head.shift_label).",
        "It drafts the most likely tokens at every temperature. `--speculative-domino-candidate-pool-size` lets it choose "
        "among fewer tokens: other drafts, the same text.",
    ),
    needs="blocks",
)
LAYOUTS = (Layout("domino", DOMINO, load_domino_directory, {"sglang": _SGLANG}),)

FORMATS = (
    Format(
        "a Domino head",
        2,
        lambda f: (
            any(name.startswith("prefix_gru.") for name in f.names) or "domino" in str(f.config.get(block.SECTION))
        ),
        load_domino_directory,
    ),
)
