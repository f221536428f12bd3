"""The README.md of an export: what it holds, how each engine is started on it, and what to watch for."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.contracts import ModelFiles, target_reference
from draftsmith.heads.formats.engines import ENGINES, split_obstacle
from draftsmith.heads.formats.layout import Layout
from draftsmith.heads.formats.start import ADAPTER_NAME, RESERVED_PATH_WORDS, Adapter, Serving
from draftsmith.heads.target.target import Target

README = "README.md"
USUAL_TOKENS = 5

_CHECK = """## Check the first start

Send the prompts of your evaluation at temperature 0, and read the engine's own counters:

{counters}

No counters: it does not speculate, and a flag is missing. Drafts and almost none accepted: it runs another algorithm, or
another target or chat template than the head was trained for. The mean of your report, but no gain: the batch is too large,
or drafting is too slow there; measure with and without.
"""


@dataclass(frozen=True)
class Exported:
    """What was exported, and where to.

    target_note: text about the target, where that was exported too. adapter: its export, where that is an adapter.
    """

    head: DraftHead
    target: Target
    layout: Layout
    files: ModelFiles
    folder: Path
    num_speculative_tokens: int | None = None
    tensor_parallel: int = 1
    target_note: str = ""
    adapter: Adapter | None = None

    @property
    def serving(self) -> Serving:
        """The values that go into the engines' start lines."""
        heads = getattr(self.head.options, "num_heads", 0)
        return Serving(
            draft=str(self.folder),
            target=target_reference(self.target),
            tokens=self.head.engine_draft_length(self.num_speculative_tokens or USUAL_TOKENS),
            dtype=str(self.files.dtype).removeprefix("torch."),
            gpus=self.tensor_parallel,
            layer_ids=tuple(self.head.reads.layer_ids),
            heads=heads,
            adapter=self.adapter,
        )


def write_readme(exported: Exported) -> str:
    """Return the text of README.md. It has no front matter: converters that read model cards find none."""
    parts = [
        f"# {exported.head.method} head, layout {exported.layout.name}\n",
        _facts(exported),
        "## Start an engine\n",
    ]
    if not exported.layout.engines:
        return "\n".join([*parts, "No engine that draftsmith knows reads this layout.\n"])
    parts += [_section(exported, engine) for engine in exported.layout.engines]
    served = [engine for engine in exported.layout.engines if _why_not(exported, engine) is None]
    counters = "\n".join(f"- {ENGINES[engine].title}: {ENGINES[engine].counters}." for engine in served)
    return "\n".join([*parts, _CHECK.format(counters=counters)])


def _facts(exported: Exported) -> str:
    head, target, serving = exported.head, exported.target, exported.serving
    vocabulary = target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    layers = ", ".join(map(str, head.reads.layer_ids))
    reads = f"the streams that enter layers {layers} of {target.num_layers}" if layers else "the last hidden state"
    reads = reads if head.reads.target_states else "the text alone"
    lines = [
        f"target: `{serving.target}`, fingerprint {target.fingerprint}",
        f"reads: {reads}",
        f"drafts among: {vocabulary} of {target.vocab_size} tokens",
        f"num_speculative_tokens: {serving.tokens}, the number in the lines below",
        f"weights: {serving.dtype}",
    ]
    gpus = f"checked for {serving.gpus} GPUs" if serving.gpus > 1 else "for one GPU"
    about = [exported.target_note, ""] if exported.target_note else []
    return "\n".join([*about, *(f"- {line}" for line in lines), f"- tensor parallelism: {gpus}", ""])


def _section(exported: Exported, engine: str) -> str:
    """Return the section of one engine: how to start it and what to watch for, or why it cannot serve this head."""
    known = ENGINES[engine]
    lines = [f"### {known.title}", ""]
    if (why := _why_not(exported, engine)) is not None:
        return "\n".join([*lines, f"Not with this export: {known.title} {why}.", ""])
    ran = exported.layout.was_run(engine) and exported.adapter is None  # no engine was run with one
    how = "" if ran else ", read from its source"
    lines.append(f"Held against {known.title} {known.version}{how}.\n")
    for snippet in exported.layout.engines[engine].start(exported.serving):
        if snippet.file:
            lines.append(f"`{snippet.file}`:\n")
        lines.append(f"```{snippet.language}\n{snippet.text}```\n")
    notes = [*_which_model(exported), *exported.layout.engines[engine].caveats, *_misleading_path(exported, engine)]
    lines += [f"- {text}" for text in notes]
    return "\n".join([*lines, ""])


def _why_not(exported: Exported, engine: str) -> str | None:
    rule = exported.layout.blocking_rule(engine, exported.files, exported.target, exported.head)
    if rule is not None:
        return f"{rule.why} ({rule.what}); {rule.instead}"
    if exported.adapter is not None and not ENGINES[engine].serves_adapters:
        return "is started on the target without its adapter; export with `export.adapter: merge`"
    return split_obstacle(engine, exported.files, exported.tensor_parallel)


def _which_model(exported: Exported) -> list[str]:
    if exported.adapter is None:
        return []
    return [
        f"Requests must name the model `{ADAPTER_NAME}`: under its own name the target answers without the adapter, and the "
        "heads draft for another one."
    ]


def _misleading_path(exported: Exported, engine: str) -> list[str]:
    found = RESERVED_PATH_WORDS.search(exported.serving.draft.lower())
    if engine != "vllm" or exported.layout.name not in ("medusa_vllm", "draft_model") or found is None:
        return []
    return [f"**The path of this export holds `{found[0]}`, which vLLM takes for the method: move the folder first.**"]
