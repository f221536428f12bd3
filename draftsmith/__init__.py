"""draftsmith: train, measure and export draft heads for speculative decoding.

What is named in `__all__` is what users import, and stays; everything else is internal. docs/api.md shows it at work.
Nothing is loaded before it is used, so `import draftsmith` takes no time.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.decoder.answers import Generation, Request, Tally
    from draftsmith.decoder.sampling import Sampling
    from draftsmith.errors import UserError
    from draftsmith.eval.drafters.system import SystemUnderTest
    from draftsmith.eval.planner.routing import read_rules, route
    from draftsmith.heads.base import DraftHead
    from draftsmith.heads.formats.recognise import load_head
    from draftsmith.heads.registry import Method
    from draftsmith.recipe.schema import Recipe
    from draftsmith.target.target import Target

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "draftsmith needs the locks, signals and limits of Linux or macOS: on Windows install and run it within WSL (wsl --install)"
    )

__all__ = [
    "DraftHead",
    "Generation",
    "Method",
    "Recipe",
    "Request",
    "Sampling",
    "Tally",
    "Target",
    "UserError",
    "decode",
    "export",
    "load_head",
    "load_recipe",
    "load_target",
    "read_rules",
    "route",
    "simulate",
]

_MODULES = {
    "DraftHead": "heads.base",
    "Generation": "decoder.answers",
    "Method": "heads.registry",
    "Recipe": "recipe.schema",
    "Request": "decoder.answers",
    "Sampling": "decoder.sampling",
    "Tally": "decoder.answers",
    "Target": "target.target",
    "UserError": "errors",
    "load_head": "heads.formats.recognise",
    "read_rules": "eval.planner.routing",
    "route": "eval.planner.routing",
}
"""Where names of `__all__` are that are not defined here: they are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(import_module(f"draftsmith.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_target(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    gpus: int = 1,
    tensor_parallel: int = 1,
) -> "Target":
    """Return a frozen target, checked to be one that the decoder serves exactly.

    Args:
        path: a local folder, a Hub name or a GGUF file.
        dtype: "float32", "bfloat16" or "float16"; "auto" is the checkpoint's.
        device: such as "cuda" or "cuda:1".
        attn_implementation: attention code of transformers, "sdpa" or "eager".
        trust_remote_code: run code that comes with the checkpoint.
        gpus: GPUs from `device` on that its layers are spread over, for a target larger than one.
        tensor_parallel: processes that share every layer, of those that `torchrun` has started so many in a row; these call everything alike, and
            each has the states, logits and answers. `gpus` is then 1, and `device` "cuda" where there is a GPU.

    Raises:
        UserError: the path, file or architecture cannot be used, or the folder is a draft head's.
    """
    from draftsmith.decoder.selfcheck import check_decoding
    from draftsmith.heads.formats.recognise import refuse_head
    from draftsmith.target import target as opened

    refuse_head(str(path))
    target = opened.load_target(
        str(path),
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        gpus=gpus,
        tensor_parallel=tensor_parallel,
    )
    check_decoding(target)
    return target


def decode(
    target: "Target",
    head: "DraftHead | None",
    requests: "Sequence[Request]",
    *,
    sampling: "Sampling | None" = None,
    num_speculative_tokens: int = 5,
    tree: str | Path = "chain",
    batch: int = 1,
) -> "list[Generation]":
    """Answer requests with drafts; every text is one that the target alone could have written.

    Args:
        target: what `load_target` returns.
        head: what `load_head` returns; None decodes with the target alone.
        requests: prompts as token ids, with the most tokens of an answer.
        sampling: greedy if left out.
        num_speculative_tokens: tokens of a drafted chain, at most as many as the head drafts.
        tree: "chain", "medusa_63", "dynamic", "best_first", "accum_logp", or a JSON file with a list of paths.
        batch: requests decoded together.

    Returns:
        An answer per request, in their order, with the rounds that it took.

    Raises:
        UserError: the target cannot serve a request, or the head does not draft such a tree.
    """
    from draftsmith.decoder.decode import check_requests, decode_batch
    from draftsmith.decoder.draft import TargetAlone
    from draftsmith.decoder.sampling import Sampling

    _check_types(target, head, sampling, "requests", requests)
    _check_count("batch", batch)
    chosen = sampling or Sampling()
    if head is None:
        return decode_batch(target, TargetAlone(), requests, chosen, rows=batch).generations
    check_requests(target, requests)
    drafts = _drafts(target, head, num_speculative_tokens, tree)
    _check_lengths(head, drafts, [len(one.prompt_ids) + one.max_new_tokens for one in requests])
    drafter = drafts.make(drafts.num_speculative_tokens)
    return decode_batch(drafts.verified_by(target), drafter, requests, chosen, rows=batch).generations


def simulate(
    target: "Target",
    head: "DraftHead",
    answers: "Sequence[Generation]",
    *,
    sampling: "Sampling | None" = None,
    num_speculative_tokens: int = 5,
    tree: str | Path = "chain",
) -> "Tally":
    """Say what a head's drafts would get accepted on finished answers, from one pass over each.

    Args:
        target: what `load_target` returns.
        head: what `load_head` returns.
        answers: by `target` under `sampling`, with or without drafts; then the result is exact.
        sampling: how the answers were chosen; greedy if left out.
        num_speculative_tokens: tokens of a drafted chain.
        tree: as in `decode`.

    Returns:
        `tau` is the tokens per target pass, `acceptance_at` the probability that each position is accepted.

    Raises:
        UserError: the text alone does not tell what the tree drafts.
    """
    from draftsmith.decoder.answers import total
    from draftsmith.decoder.sampling import Sampling
    from draftsmith.errors import UserError

    _check_types(target, head, sampling, "answers", answers)
    if (odd := next((one for one in answers if not isinstance(one.output_ids, list | tuple)), None)) is not None:
        raise UserError(
            f"The answer to {odd.request.sample_id!r} is a {type(odd.output_ids).__name__}: give a list of token ids."
        )
    if (empty := next((one for one in answers if not one.output_ids), None)) is not None:
        raise UserError(f"The answer to {empty.request.sample_id!r} has no tokens: leave it out.")
    drafts = _drafts(target, head, num_speculative_tokens, tree)
    _check_lengths(head, drafts, [len(one.request.prompt_ids) + len(one.output_ids) for one in answers])
    if drafts.simulate is None:
        raise UserError(
            f"The tree {tree!r} cannot be simulated, since what it drafts depends on more than the text: decode with it."
        )
    simulated = drafts.simulate(drafts.verified_by(target), answers, sampling or Sampling(), drafts.max_k)
    return total((tallies[-1] for tallies in simulated.tallies), drafts.max_k)


def export(
    head: "DraftHead",
    target: "Target",
    folder: str | Path,
    *,
    layout: str | None = None,
    dtype: str | None = None,
    num_speculative_tokens: int | None = None,
    tensor_parallel: int = 1,
) -> Path:
    """Write a head as the directory that a serving engine loads, and check it by loading it again.

    Args:
        head: what `load_head` returns.
        target: what it was made for.
        folder: where the directory goes.
        layout: a name of docs/export.md; None takes the first of the head's method.
        dtype: of the weights; None takes the target's.
        num_speculative_tokens: written where an engine is told how many tokens to draft.
        tensor_parallel: GPUs that an engine must be able to split the draft over.

    Returns:
        The directory.

    Raises:
        UserError: the layout cannot hold the head, or the folder holds anything else.
    """
    from draftsmith.errors import UserError
    from draftsmith.heads.export.export import export_head

    if "tuned" in head.trains.outputs:
        raise UserError(
            f"{head.method} heads draft for a target that was tuned with them, which is exported with them: use the "
            "command `draftsmith export`."
        )
    return export_head(
        head,
        target,
        folder,
        layout=layout,
        dtype=dtype,
        num_speculative_tokens=num_speculative_tokens,
        tensor_parallel=tensor_parallel,
    )


def load_recipe(path: str | Path, *overrides: str) -> "Recipe":
    """Return the recipe in a YAML file.

    Args:
        path: the file, or a name that `draftsmith recipes` lists.
        overrides: as on the command line, such as "--train.lr=2e-4".

    Raises:
        UserError: a key is unknown, or its value wrong; the sentence names it.
    """
    from draftsmith.errors import UserError
    from draftsmith.recipe.parse import parse_recipe

    if odd := [one for one in overrides if not isinstance(one, str)]:
        raise UserError(f'load_recipe takes overrides as texts one by one, such as "--train.lr=2e-4", not {odd[0]!r}.')
    return parse_recipe(["--recipe", str(path), *overrides])


def _check_types(target: Any, head: Any, sampling: Any, name: str, texts: Any) -> None:
    """Raise UserError for an argument of another type; `name` is that of `texts`."""
    from draftsmith.decoder.answers import Generation, Request
    from draftsmith.decoder.sampling import Sampling
    from draftsmith.errors import UserError
    from draftsmith.fields import shown
    from draftsmith.heads.base import DraftHead
    from draftsmith.target.target import Target

    kind = Request if name == "requests" else Generation
    for argument, value, allowed, wanted in (
        ("target", target, Target, "what load_target returns"),
        ("head", head, DraftHead | None if name == "requests" else DraftHead, "what load_head returns"),
        ("sampling", sampling, Sampling | None, "a Sampling, such as Sampling(temperature=0.7)"),
        (name, texts, Sequence, f"a list of {kind.__name__}"),
        *(
            (f"{name}[{i}]", one, kind, f"a {kind.__name__}")
            for i, one in enumerate(texts if isinstance(texts, Sequence) else ())
        ),
    ):
        if not isinstance(value, allowed):
            raise UserError(f"{argument} is {shown(value)}, of the type {type(value).__name__}: give {wanted}.")


def _check_count(name: str, value: Any) -> None:
    """Raise UserError for what is no whole number from 1 on."""
    from draftsmith.errors import UserError
    from draftsmith.fields import shown

    if type(value) is not int or value < 1:
        raise UserError(f"{name} is {shown(value)}: it must be at least 1.")


def _check_lengths(head: "DraftHead", drafts: "SystemUnderTest", lengths: "list[int]") -> None:
    """Raise UserError where a text of so many tokens is longer than the head reads with its draft."""
    from draftsmith.decoder.drafters.draft_model import check_context

    if head.reads.context_length is not None:
        need = max(lengths, default=0) + drafts.num_speculative_tokens
        check_context(f"{head.method} head", head.reads.context_length, need)


def _drafts(target: "Target", head: "DraftHead", num_speculative_tokens: int, tree: str | Path) -> "SystemUnderTest":
    """Return how a head drafts once trained, in the dtype of the target; the head itself is left as it is."""
    from draftsmith.decoder.trees import DynamicTree
    from draftsmith.errors import UserError
    from draftsmith.eval.drafters.system import check_ranks, cut_tree, head_system
    from draftsmith.fields import shown
    from draftsmith.heads.quantized import view_of_head
    from draftsmith.recipe.evaluate import DraftSpec

    _check_count("num_speculative_tokens", num_speculative_tokens)
    if not isinstance(tree, str | Path):
        raise UserError(
            f"tree is {shown(tree)}: give chain, medusa_63, dynamic, best_first, accum_logp or the path of a JSON file with a list of paths."
        )
    ready = view_of_head(head.deployed(target)).to(target.dtype)
    shape = DraftSpec(tree=str(tree)).load()
    if isinstance(shape, DynamicTree):  # whose depth nobody named
        shape = cut_tree(shape, ready.clamp_draft_length(shape.depth))
    check_ranks(shape, ready.method, ready, target)
    verifier = ready.verifier(target)
    return head_system(
        ready.method,
        ready,
        num_speculative_tokens,
        num_speculative_tokens,
        tree=shape,
        verifier=None if verifier is target else verifier,
    )
