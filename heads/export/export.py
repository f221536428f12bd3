"""Writing a head as the directory that a serving engine loads: validated before it is written, then loaded again.

What a layout must hold, how heads are converted to it and back, and what engines do with it is in each method's formats.py.
Shapes: H target hidden, A aux layers, V target vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

import draftsmith
from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead, drafting
from draftsmith.heads.checkpoint import CONFIG, EMBEDDING, borrows_embedding, model_directory
from draftsmith.heads.export.readme import README, Exported, write_readme
from draftsmith.heads.formats.engines import ENGINES, Adapter, Again, Serving, split_obstacle
from draftsmith.heads.formats.layout import Layout, default_layout, find_layout, layouts_of
from draftsmith.heads.formats.schema import FLOATS, Export, ModelFiles, flatten, target_reference
from draftsmith.heads.record import NO_HISTORY, RECORD, History, Passport, facts_of, what_it_reads, write_passport
from draftsmith.target.identity import TargetIdentity
from draftsmith.target.target import Target, shortened

USUAL_TOKENS = 5
PARITY = "parity"
"""The folder of what an engine must give for a few prompts, see draftsmith.eval.parity."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


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
    target_note: str = "",
    adapter: Adapter | None = None,
    planned: tuple[tuple[int, int, int], ...] = (),
    verdict: str = "",
    again: Again | None = None,
    history: History = NO_HISTORY,
    rendered: tuple[str, str] = ("", ""),
    beside: Callable[[Path, DraftHead, int], None] | None = None,
) -> Path:
    """Write `head` as the directory `dest` that a serving engine loads, and return its path.

    layout: a name of `layouts_of`, None for the method's default. dtype: of the float tensors, None for the target's. include_embeddings: store the input embeddings too where
    engines otherwise share the target's. num_speculative_tokens: written into layouts that tell the engine how many tokens to draft, and into README.md; at most as many as the
    head drafts. tensor_parallel: over how many GPUs an engine must be able to split the draft. made_for: the target that draftsmith.json names, `target` if left out.
    target_note: what README.md says of a target that was exported too. adapter: that export, where the target is served with an adapter. planned: (first batch, last batch,
    tokens to draft), what an evaluation found fastest, which README.md then starts engines with. verdict: of an evaluation that found that the head does not pay, which
    README.md opens with. again: how the export is made again, for its lines. history: for the passport. rendered: see `Serving`. beside: writes PARITY into the folder that it
    gets with the head as it was loaded again and the tokens that engines draft. The head itself is not changed. Raises UserError where the layout cannot hold the head, and for
    a destination that cannot be written; nothing is left behind then. What was written is loaded again and must give the same logits.
    """
    dest, head = Path(dest).absolute(), head.served()
    most = max((k for *_, k in planned), default=num_speculative_tokens)
    chosen = find_layout(layout or default_layout(head.method, str(target.path)), head.method)
    files = convert_head(
        head,
        target,
        layout=chosen.name,
        dtype=dtype,
        include_embeddings=include_embeddings,
        num_speculative_tokens=most,
        tensor_parallel=tensor_parallel,
    )
    serving = Serving(
        draft=str(dest),
        target=target_reference(target),
        tokens=head.engine_tokens or head.clamp_draft_length(most or USUAL_TOKENS),
        dtype=str(files.dtype).removeprefix("torch."),
        gpus=tensor_parallel,
        layer_ids=tuple(head.reads.layer_ids),
        heads=getattr(head.options, "num_heads", 0),
        adapter=adapter,
        # A plan with a block of another length is of drafts that engines do not make.
        by_batch=planned if head.engine_tokens is None or {k for *_, k in planned} <= {0, head.engine_tokens} else (),
        again=again or Again(),
        context=shortened(target.config),
        rendered=rendered,
    )
    exported = Exported(head, target, chosen, files, serving, target_note, verdict, history)
    return _write(dest, exported, made_for or target.identity, beside)


def _write(
    dest: Path,
    exported: Exported,
    made_for: TargetIdentity,
    beside: Callable[[Path, DraftHead, int], None] | None,
) -> Path:
    """Write the directory, all or nothing, and load it again; return its path."""
    head, files, layout = exported.head, exported.files, exported.layout
    with model_directory(dest, replaces=replaced_files(dest, files)) as temporary:
        layout.schema.save(temporary, files)
        passport = Passport(
            draftsmith=draftsmith.__version__,
            method=head.method,
            layout=layout.name,
            target=what_it_reads(head, made_for).to_json(),
            head=facts_of(head),
            num_speculative_tokens=exported.serving.tokens,
            dtype=exported.serving.dtype,
            trained=exported.history.trained,
            measured=exported.history.measured,
        )
        write_passport(temporary, passport)
        (temporary / README).write_text(write_readme(exported), encoding="utf-8")
        reloaded = layout.load(temporary, exported.target)
        assert same_logits(head, reloaded, files, exported.target), "the export gives other logits"
        assert facts_of(reloaded) == facts_of(head), "the export is computed otherwise"
        if beside is not None:
            beside(temporary, reloaded.to(exported.target.device).eval(), exported.serving.tokens)
    return dest


def replaced_files(dest: Path, files: ModelFiles) -> tuple[str, ...]:
    """Return the names of the files that an export to `dest` may replace: none where no export is there."""
    return (CONFIG, RECORD, README, PARITY, files.weights, *files.copies) if (dest / CONFIG).is_file() else ()


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
    """Return the files that `export_head` would write, checked against the layout's schema; nothing is written.

    With an untrained head this shows before training whether a layout can hold it.
    """
    chosen, head = find_layout(layout, head.method), head.served()
    K = None if num_speculative_tokens is None else head.clamp_draft_length(num_speculative_tokens)
    name = str(target.dtype if dtype in (None, "auto") else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"export.dtype is {name!r}: choose one of {', '.join(DTYPES)}.")
    export = Export(head, target, DTYPES[name], K)
    files = chosen.schema.write(export)
    _check_range(chosen, files, export)
    row = next((row for row in chosen.schema.tensors if (row.ours or row.name) == EMBEDDING), None)
    if row is None:
        files.tensors.pop(EMBEDDING, None)
    if include_embeddings:
        if not any(name.endswith(EMBEDDING) for name in files.tensors):
            raise UserError(
                f"export.include_embeddings is true, but the layout {layout} holds no input embeddings: leave it out."
            )
    elif row is not None and row.optional and borrows_embedding(head.get_parameter(EMBEDDING), target):
        del files.tensors[row.name]
    chosen.refuse_what_engines_lack(files, target, head)
    blocked = chosen.blocking_rules(files, target, head)
    serve = [engine for engine in chosen.engines if engine not in blocked]
    _check_split(chosen, serve or list(chosen.engines), files, tensor_parallel)
    chosen.schema.check(files)
    return files


def _check_range(layout: Layout, files: ModelFiles, export: Export) -> None:
    """Raise UserError for a tensor with numbers that the dtype of the files does not hold: they would be infinite there."""
    found = [name for name, x in files.tensors.items() if x.is_floating_point() and bool(x.isinf().any())]
    if found and bool(layout.schema.write(replace(export, dtype=torch.float32)).tensors[found[0]].isfinite().all()):
        raise UserError(
            f"The tensor {found[0]} does not fit {export.dtype_name}, which holds numbers up to {torch.finfo(export.dtype).max:g}: export "
            "bfloat16 or float32 (export.dtype)."
        )


def engines_without(head: DraftHead, target: Target) -> tuple[str, ...]:
    """Return the engines that do not compute the head as it was trained though they read its method, each as LAYOUT/ENGINE, for every
    layout of the method."""
    found: list[str] = []
    for layout in layouts_of(head.method).values():
        try:
            files = convert_head(head, target, layout=layout.name)
        except UserError:
            without = list(layout.engines)
        else:
            without = list(layout.blocking_rules(files, target, head.served()))
        found += [f"{layout.name}/{engine}" for engine in without]
    return tuple(found)


def _check_split(layout: Layout, engines: list[str], files: ModelFiles, gpus: int) -> None:
    """Raise UserError where none of these engines could split the draft over that many GPUs."""
    obstacles = {engine: split_obstacle(engine, files, gpus) for engine in engines if ENGINES[engine].split is not None}
    if obstacles and all(obstacles.values()):
        engine, why = next(iter(obstacles.items()))
        raise UserError(
            f"export.tensor_parallel is {gpus}, but {ENGINES[engine].title} cannot split this head in the layout {layout.name} "
            f"over {gpus} GPUs, since it {why}."
        )


@torch.no_grad()
def same_logits(head: DraftHead, reloaded: DraftHead, files: ModelFiles, target: Target) -> bool:
    """Return whether both heads give the same logits on random input, `head` with its weights rounded to the files' dtype.

    All steps or heads of training are compared, as far as the head drafts. An embedding that is the target's is not rounded, where
    the files leave it out: whatever a layout calls it, `reloaded` has it from one of the two.
    """
    stored = dict(reloaded.named_parameters())
    rounded = {
        f"head.{name}": value.to(files.dtype).to(stored[name])
        for name, value in head.named_parameters()
        if name in stored  # a bias of zeros is none when it is read again
    }
    if f"head.{EMBEDDING}" in rounded and torch.equal(
        own := head.get_parameter(EMBEDDING).to(stored[EMBEDDING]), stored[EMBEDDING]
    ):
        rounded[f"head.{EMBEDDING}"] = own
    steps = head.clamp_draft_length(head.trains.steps)
    window = flatten(files.config).get("sliding_window") or 0  # a window that is lost shows on longer texts only
    # One document of random tokens and states, all of them to learn.
    length = window + steps + 8
    generator = torch.Generator().manual_seed(0)
    H = target.hidden_size
    batch = TrainBatch(
        ids=torch.randint(target.vocab_size, (1, length), generator=generator),
        mask=torch.ones(1, length, dtype=torch.bool),
        document=torch.zeros(1, length, dtype=torch.int64),
        position=torch.arange(length)[None],
        aux=torch.randn(1, length, len(reloaded.reads.layer_ids) * H, generator=generator),
        last=torch.randn(1, length, H, generator=generator),
        top1=torch.zeros(1, length, dtype=torch.int64),
        logsumexp=torch.zeros(1, length),
    ).to(next(reloaded.parameters()).device)
    with drafting(head, reloaded):
        ours, chosen = functional_call(_Logits(head), rounded, (batch, steps))
        theirs, others = _Logits(reloaded)(batch, steps, ours)
    return all(agree(a, b) for a, b in zip([*ours, *chosen], [*theirs, *others], strict=True))


def agree(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether logits [..., W] are equal up to rounding, which may depend on where in memory a matrix begins; infinite ones, those
    of tokens that are not drafted, must be the same."""
    bound = 1e-4 if ours.dtype == torch.float32 else 5e-2
    infinite = ours.isinf()
    if not torch.equal(infinite, theirs.isinf()) or not torch.equal(ours[infinite], theirs[infinite]):
        return False
    # In fp32, as a sum over a vocabulary may be more than a half holds, and all are within infinity.
    ours, theirs = (x.masked_fill(infinite, 0.0).float() for x in (ours, theirs))
    apart, size = (ours - theirs).abs().sum(-1), 1.0 + ours.abs().sum(-1)
    # A real difference is of the size of the logits themselves, so that the tolerance need not be fine. NaN is within none.
    return bool((apart <= bound * size).all())


class _Logits(nn.Module):
    """A head's logits of all steps, computed while its weights stand in for others."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, batch: TrainBatch, steps: int, likely: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logits [R_k, W] of each step, and the scores [R_k, W] that selectors give to the likeliest tokens.

        likely: the logits to find these by, None for its own. Two heads that differ by rounding may find others where tokens are as likely.
        """
        made = self.head(batch, steps).steps
        logits = [step.projected(*step.sources) for step in made]
        scores = [
            step.selector.chosen(by, *step.sources)
            for step, by in zip(made, logits if likely is None else likely, strict=True)
            if step.selector is not None
        ]
        return logits, scores
