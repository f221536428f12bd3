"""Rules and caveats that layouts of several methods share; see layout.py."""

from collections.abc import Callable

from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.formats.contracts import ModelFiles, flatten
from draftsmith.heads.formats.layout import Rule
from draftsmith.heads.formats.published import is_the_same
from draftsmith.heads.target.target import Target

VLLM_SAME_GPUS = "vLLM 0.32 runs these drafts on as many GPUs as the target: `draft_tensor_parallel_size` is accepted, and changes nothing."
SGLANG_ROOT = "The root counts: a chain of K tokens is K steps, top-k 1 and K + 1 draft tokens."
LLAMA_CPP_SILENT = "Without `--spec-type` it does not speculate, and says nothing."
SPECULATORS_NUMBERS = (
    "The export names the target and the number of tokens; other numbers need another export, or the flat layout."
)
SPECULATORS_COMPLETE = "The package knows `layers.0.` and needs the embeddings; both are there."

MEASURE = "measure it with draftsmith evaluate, or train an EAGLE-3 head, which has a projection of its own"


def name_the_method(method: str) -> str:
    """Return the caveat on how vLLM guesses a method that is not named."""
    return (
        "Name the method. Without `method`, vLLM guesses it from the path of the draft: one that holds `eagle-` anywhere is "
        "taken for EAGLE-1, otherwise one that holds `eagle3` for EAGLE-3, and any other for a language model of its own. With "
        f'`"method": "{method}"` the path does not matter.'
    )


def has_flag(name: str) -> Callable[[ModelFiles, Target, DraftHead], bool]:
    """Return whether a switch of config.json is on."""
    return lambda files, target, head: bool(flatten(files.config).get(name))


def changed_embedding(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the files hold other embeddings than the target's; those written for completeness, rounded or not, are its own."""
    return EMBEDDING in files.tensors and not is_the_same(files.tensors[EMBEDDING], target.embedding)


def biased_target(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the target's output projection has a bias."""
    return target.head.bias is not None


def more_than_a_matrix(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the target's output projection has a bias, a scale or a softcap."""
    own = target.head
    return own.bias is not None or own.scale != 1.0 or own.softcap is not None


def other_width(what: str) -> Rule:
    """Return the rule of the speculators package about a draft whose width is not the target's."""
    return Rule(
        what,
        "takes the draft to be as wide as the target",
        "serve it with vLLM, or leave head.hidden_size out",
        lambda files, target, head: flatten(files.config)["hidden_size"] != target.hidden_size,
        refused=False,
    )
