"""Native head in, engine directory out: validated before it is written, read back before it is kept.

A layout is one line in LAYOUTS; what it must hold is in <family>_layouts.py, how heads get there and back in
<family>_export.py. Shapes: H target hidden, A aux layers, V target vocab.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead, agree, drafting
from draftsmith.heads.block_export import load_dflash_directory, load_dspark_directory, to_dflash, to_dspark
from draftsmith.heads.block_layouts import DFLASH, DFLASH_LLAMA_CPP, DSPARK, DSPARK_LLAMA_CPP
from draftsmith.heads.checkpoint import CONFIG, EMBEDDING, atomic_directory, borrows_embedding, write_model_files
from draftsmith.heads.contracts import FLOATS, Contract, ExportRequest, ModelFiles, validate
from draftsmith.heads.draft_lm_export import DRAFT_MODEL, load_draft_model_directory, to_draft_model
from draftsmith.heads.eagle1_contract import EAGLE1, EAGLE1_SGLANG
from draftsmith.heads.eagle1_export import to_eagle1, to_eagle1_sglang
from draftsmith.heads.eagle1_layouts import load_eagle1_directory
from draftsmith.heads.eagle3_export import (
    load_eagle3_directory,
    load_speculators_directory,
    to_flat_eagle3,
    to_speculators,
)
from draftsmith.heads.eagle3_layouts import EAGLE3, EAGLE3_LLAMA_CPP, EAGLE3_SPECULATORS
from draftsmith.heads.engine_start import Adapter
from draftsmith.heads.engines import obstacle, refuse_what_engines_lack
from draftsmith.heads.export_readme import README, Exported, write_readme
from draftsmith.heads.hydra_export import load_hydra_directory, to_hydra
from draftsmith.heads.hydra_layouts import HYDRA
from draftsmith.heads.identity import TargetIdentity
from draftsmith.heads.medusa_export import (
    load_medusa_directory,
    load_medusa_vllm_directory,
    to_medusa,
    to_medusa_tgi,
    to_medusa_vllm,
)
from draftsmith.heads.medusa_layouts import MEDUSA, MEDUSA_TGI, MEDUSA_VLLM
from draftsmith.heads.peagle_export import (
    load_peagle_directory,
    load_peagle_speculators_directory,
    to_peagle,
    to_peagle_speculators,
)
from draftsmith.heads.peagle_layouts import PEAGLE, PEAGLE_SPECULATORS
from draftsmith.heads.record import RECORD, what_it_reads, write_record
from draftsmith.heads.registry import brought_layouts, served_method
from draftsmith.heads.target import Target
from draftsmith.heads.tensor_parallel import check_split

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


@dataclass(frozen=True)
class Layout:
    """A way to write the heads of a method: the contract it must meet, and how to convert to it and back.

    convert(head, target, request) -> files; load(path, target) -> head. engines: what reads it, keys of ENGINES.
    """

    method: str
    contract: Contract
    convert: Callable[[Any, Target, ExportRequest], ModelFiles]
    load: Callable[[Path, Target], DraftHead]
    engines: tuple[str, ...]


# The first of a method is its default.
LAYOUTS: dict[str, Layout] = {
    layout.contract.name: layout
    for layout in (
        Layout("dflash", DFLASH, to_dflash, load_dflash_directory, ("vllm",)),
        Layout("dflash", DFLASH_LLAMA_CPP, to_dflash, load_dflash_directory, ("llama_cpp",)),
        Layout(
            "draft_model",
            DRAFT_MODEL,
            to_draft_model,
            load_draft_model_directory,
            ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "transformers"),
        ),
        Layout("dspark", DSPARK, to_dspark, load_dspark_directory, ("vllm",)),
        Layout("dspark", DSPARK_LLAMA_CPP, to_dspark, load_dspark_directory, ("llama_cpp",)),
        Layout("eagle1", EAGLE1, to_eagle1, load_eagle1_directory, ("vllm",)),
        Layout("eagle1", EAGLE1_SGLANG, to_eagle1_sglang, load_eagle1_directory, ("sglang",)),
        Layout("eagle3", EAGLE3, to_flat_eagle3, load_eagle3_directory, ("vllm", "sglang", "tensorrt_llm")),
        Layout("eagle3", EAGLE3_LLAMA_CPP, to_flat_eagle3, load_eagle3_directory, ("llama_cpp",)),
        Layout("eagle3", EAGLE3_SPECULATORS, to_speculators, load_speculators_directory, ("vllm", "speculators")),
        Layout("hydra", HYDRA, to_hydra, load_hydra_directory, ("hydra_original",)),
        Layout("medusa", MEDUSA, to_medusa, load_medusa_directory, ("medusa_original", "tensorrt_llm")),
        Layout("medusa", MEDUSA_TGI, to_medusa_tgi, load_medusa_directory, ("tgi",)),
        Layout("medusa", MEDUSA_VLLM, to_medusa_vllm, load_medusa_vllm_directory, ("vllm",)),
        Layout("peagle", PEAGLE, to_peagle, load_peagle_directory, ("vllm",)),
        Layout(
            "peagle",
            PEAGLE_SPECULATORS,
            to_peagle_speculators,
            load_peagle_speculators_directory,
            ("vllm", "speculators"),
        ),
    )
}


def layouts_of(method: str) -> dict[str, Layout]:
    """Return the layouts that hold heads of `method` by name, its default first; none for an unknown method. Raises
    UserError where a package brings one under a name of ours."""
    served = served_method(method)
    found = {name: layout for name, layout in LAYOUTS.items() if layout.method == served}
    for layout in brought_layouts(served):
        if (name := layout.contract.name) in LAYOUTS:
            raise UserError(f"The method {served!r} brings a layout named {name!r}, which draftsmith has: rename it.")
        found[name] = layout
    return found


def layouts_for(method: str) -> list[str]:
    """Return the names of the layouts that hold heads of `method`, its default first; none for an unknown method."""
    return list(layouts_of(method))


def default_layout(method: str) -> str:
    """Return the layout that heads of `method` are exported to unless another is asked for. Raises UserError where there
    is none."""
    if not (names := layouts_for(method)):
        raise UserError(f"{method} heads cannot be exported yet: export one of another method.")
    return names[0]


def find_layout(layout: str, method: str) -> Layout:
    """Return the layout of that name. Raises UserError for an unknown one and for one of another method."""
    known = layouts_of(method)
    if layout not in known:
        default_layout(method)  # says so where there is none
        what = f"holds {LAYOUTS[layout].method} heads, not {method}" if layout in LAYOUTS else "is unknown"
        raise UserError(f"export.layout is {layout!r}, which {what}: choose one of {', '.join(known)}.")
    return known[layout]


def export_head(
    head: DraftHead,
    target: Target,
    dest: Path | str,
    *,
    layout: str | None = None,
    dtype: str | torch.dtype | None = None,
    include_embeddings: bool = False,
    num_speculative_tokens: int | None = None,
    tensor_parallel: int = 1,
    made_for: TargetIdentity | None = None,
    beside: str = "",
    adapter: Adapter | None = None,
) -> Path:
    """Write `head` as the directory `dest` that a serving engine loads, and return its path.

    layout: a name of `layouts_of`, None for the method's default. dtype: of the float tensors, None for the target's.
    include_embeddings: store the input embeddings too where engines otherwise share the target's.
    num_speculative_tokens: written into layouts that tell the engine how many tokens to draft, and into README.md; at most
    as many as the head drafts.
    tensor_parallel: over how many GPUs an engine must be able to split the draft. made_for: the target that
    draftsmith.json names, `target` if left out. beside: what README.md says of the target's own export. adapter: that
    export, where the target is served with an adapter. The head itself is not changed. Raises UserError where the layout
    cannot hold the head, and for a destination that cannot be written; nothing is left behind then. What was written is
    loaded again and must give the same logits.
    """
    dest, head = Path(dest).absolute(), head.served()
    layout = layout or default_layout(head.method)
    files = convert_head(
        head,
        target,
        layout=layout,
        dtype=dtype,
        include_embeddings=include_embeddings,
        num_speculative_tokens=num_speculative_tokens,
        tensor_parallel=tensor_parallel,
    )
    chosen = find_layout(layout, head.method)
    told = Exported(
        head, target, layout, chosen.engines, files, dest, num_speculative_tokens, tensor_parallel, beside, adapter
    )
    with atomic_directory(dest, replaces=replaced_files(dest, files)) as temporary:
        write_model_files(temporary, files.config, files.tensors, files.weights)
        for name, source in files.copies.items():
            shutil.copyfile(source, temporary / name)
        write_record(temporary, head.method, layout, what_it_reads(head, made_for or target.identity))
        (temporary / README).write_text(write_readme(told), encoding="utf-8")
        reloaded = chosen.load(temporary, target)
        assert same_logits(head, reloaded, files, target), "the export gives other logits"
    return dest


def replaced_files(dest: Path, files: ModelFiles) -> tuple[str, ...]:
    """Return the names of the files that an export to `dest` may replace; a README alone is not ours."""
    return (CONFIG, RECORD, README, files.weights, *files.copies) if (dest / CONFIG).is_file() else ()


def convert_head(
    head: DraftHead,
    target: Target,
    *,
    layout: str,
    dtype: str | torch.dtype | None = None,
    include_embeddings: bool = False,
    num_speculative_tokens: int | None = None,
    tensor_parallel: int = 1,
) -> ModelFiles:
    """Return what `export_head` would write, held against the layout's contract; nothing is written.

    An untrained head serves to find out, before training, whether a layout can hold it.
    """
    chosen, head = find_layout(layout, head.method), head.served()
    K = None if num_speculative_tokens is None else head.within_reach(num_speculative_tokens)
    files = chosen.convert(head, target, ExportRequest(_dtype(dtype, target), K))
    rules = {rule.name: rule for rule in chosen.contract.tensors}
    if EMBEDDING not in rules:
        files.tensors.pop(EMBEDDING, None)
    if include_embeddings and not any(name.endswith(EMBEDDING) for name in files.tensors):
        raise UserError(
            f"export.include_embeddings is true, but the layout {layout} holds no input embeddings: leave it out."
        )
    optional = EMBEDDING in rules and rules[EMBEDDING].optional
    if optional and not include_embeddings and borrows_embedding(head.get_parameter(EMBEDDING), target):
        del files.tensors[EMBEDDING]
    refuse_what_engines_lack(layout, files, target)
    serve = tuple(engine for engine in chosen.engines if obstacle(layout, engine, files, target) is None)
    check_split(layout, serve or chosen.engines, files, tensor_parallel)
    validate(files, chosen.contract)
    return files


@torch.no_grad()
def same_logits(head: DraftHead, reloaded: DraftHead, files: ModelFiles, target: Target) -> bool:
    """Whether both heads give the same logits on random input, `head` with its weights rounded to the files' dtype.

    All steps or heads that training sums over are compared, as far as the head drafts. Both use the target's embedding, if they have one,
    unless the files hold it.
    """
    stored = dict(reloaded.named_parameters())
    rounded = {
        name: stored[name]
        if name == EMBEDDING and EMBEDDING not in files.tensors
        else value.to(files.dtype).to(stored[name])
        for name, value in head.named_parameters()
        if name in stored  # a bias of zeros is none when it is read again
    }
    steps = head.within_reach(head.train_steps)
    batch = _random_batch(reloaded, target, length=steps + 8)
    with drafting(head, reloaded):
        ours, theirs = functional_call(head, rounded, (batch, steps)), reloaded(batch, steps)
    return all(agree(a.logits, b.logits) for a, b in zip(ours.steps, theirs.steps, strict=True))


def _dtype(dtype: str | torch.dtype | None, target: Target) -> torch.dtype:
    name = str(target.dtype if dtype in (None, "auto") else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"export.dtype is {name!r}: choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _random_batch(head: DraftHead, target: Target, length: int) -> TrainBatch:
    """One document of random tokens and states, all of it to be learned."""
    generator = torch.Generator().manual_seed(0)
    H = target.hidden_size
    return TrainBatch(
        ids=torch.randint(target.vocab_size, (1, length), generator=generator),
        mask=torch.ones(1, length, dtype=torch.bool),
        document=torch.zeros(1, length, dtype=torch.int64),
        position=torch.arange(length)[None],
        aux=torch.randn(1, length, len(head.layer_ids) * H, generator=generator),
        last=torch.randn(1, length, H, generator=generator),
        top1=torch.zeros(1, length, dtype=torch.int64),
        logsumexp=torch.zeros(1, length),
    ).to(next(head.parameters()).device)
