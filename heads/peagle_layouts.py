"""The contracts of the P-EAGLE layouts: EAGLE-3's with the streams and the token of what is not drafted yet.

Symbols in shapes: those of eagle3_layouts.py.
"""

from dataclasses import replace

from draftsmith.heads.contracts import Contract, KeyRule, ModelFiles, TensorRule, broken
from draftsmith.heads.eagle3_layouts import EAGLE3, EAGLE3_SPECULATORS

_MASK_HIDDEN = TensorRule("mask_hidden", ("1", "1", "A*Ht"))
_MASK_TOKEN = KeyRule("mask_token_id", int, "the token of rows that are not drafted yet")


def _check_mask_token(contract: Contract, files: ModelFiles) -> None:
    V = contract.sizes(files.config)["V"]
    if not 0 <= (token := files.config["mask_token_id"]) < V:
        raise broken(contract, "config key mask_token_id", f"a token below {V}", repr(token))


def _without_feedback(rule: KeyRule) -> KeyRule:
    return replace(rule, only=False, why="nothing is fed back") if rule.name == "norm_output" else rule


_SAID = {
    "speculators_model_type": "peagle",
    "speculators_config.algorithm": "peagle",
    "architectures": ["PEagleDraftModel"],
}

# vLLM, with parallel_drafting beside method eagle3.
PEAGLE = replace(
    EAGLE3,
    name="peagle",
    tensors=(*EAGLE3.tensors, _MASK_HIDDEN),
    keys=(*(_without_feedback(rule) for rule in EAGLE3.keys), _MASK_TOKEN),
    checks=(*EAGLE3.checks, _check_mask_token),
)

# speculators: the package, and vLLM, which starts the target that the directory names and sets parallel_drafting itself.
PEAGLE_SPECULATORS = replace(
    EAGLE3_SPECULATORS,
    name="peagle_speculators",
    tensors=(*EAGLE3_SPECULATORS.tensors, _MASK_HIDDEN),
    keys=(
        *(
            replace(_without_feedback(r), only=_SAID.get(r.name, r.only)) if r.name in _SAID else _without_feedback(r)
            for r in EAGLE3_SPECULATORS.keys
        ),
        _MASK_TOKEN,
    ),
    checks=(*EAGLE3_SPECULATORS.checks, _check_mask_token),
)
