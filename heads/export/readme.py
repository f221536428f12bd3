"""The README.md of an export: what it holds, how each engine is started on it, and what to watch for."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.engines import ADAPTER_NAME, ENGINES, Serving, Snippet, split_obstacle, steps_in_words
from draftsmith.heads.formats.layout import Layout, drafts_for, joined, target_obstacle
from draftsmith.heads.formats.schema import ModelFiles
from draftsmith.heads.record import NO_HISTORY, History
from draftsmith.target.target import Target

README = "README.md"

_CHECK = """## Check the first start

Where the folder `parity` is there, `draftsmith verify THIS_FOLDER --url http://localhost:8000` asks the engine for its prompts, and names what
it does otherwise and why. Then send the prompts of your evaluation at temperature 0, and read the engine's own counters:

{counters}

No counters: it does not speculate, and a flag is missing. Drafts and almost none accepted: it runs another algorithm, or
another target or chat template than the head was trained for. The mean of your report, but no gain: the batch is too large,
or drafting is too slow there; measure with and without.
"""


_SAYS = "So says the evaluation of the run that it is from."


@dataclass(frozen=True)
class Exported:
    """What was exported, and how it is served. target_note: text about the target, where that was exported too. verdict: why the
    head should not be deployed, empty where nobody found that. history: for the passport."""

    head: DraftHead
    target: Target
    layout: Layout
    files: ModelFiles
    serving: Serving
    target_note: str = ""
    verdict: str = ""
    history: History = NO_HISTORY


def write_readme(exported: Exported) -> str:
    """Return the text of README.md. It has no front matter: converters that read model cards find none."""
    layout = exported.layout
    title = open_with(exported.verdict, f"# {exported.head.method} head, layout {layout.name}\n")
    parts = [title, _facts(exported), "## Start an engine\n"]
    if not layout.engines:
        return "\n".join([*parts, "No engine that draftsmith knows reads this layout.\n"])
    parts += [_section(exported, engine) for engine in layout.engines]
    served = [engine for engine in layout.engines if _why_not(exported, engine) is None]
    counters = "\n".join(f"- {ENGINES[engine].title}: {ENGINES[engine].counters}." for engine in served)
    return "\n".join([*parts, _CHECK.format(counters=counters)])


def open_with(verdict: str, text: str) -> str:
    """Return the text of a README with this verdict behind its title, in place of an earlier one; with none where it is empty."""
    title, _, rest = text.partition("\n")
    first, _, others = rest.lstrip("\n").partition("\n")
    rest = others if first.endswith(_SAYS) else rest
    return f"{title}\n\n**{verdict}** {_SAYS}\n{rest}" if verdict else f"{title}\n{rest}"


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
    given, file = serving.rendered
    if given or file:
        lines += [f"prompts: rendered by {' with '.join(filter(None, (file or 'the chat template', given)))}"]
    if serving.by_batch:
        lines[3] += f"; by the evaluation of this head the fastest are {steps_in_words(serving.by_batch)}"
    gpus = f"checked for {serving.gpus} GPUs" if serving.gpus > 1 else "for one GPU"
    about = [exported.target_note, ""] if exported.target_note else []
    return "\n".join([*about, *(f"- {line}" for line in lines), f"- tensor parallelism: {gpus}", ""])


def _section(exported: Exported, engine: str) -> str:
    """Return the section of one engine: how to start it and what to watch for, or why it cannot serve this head."""
    known, served, serving = ENGINES[engine], exported.layout.engines[engine], exported.serving
    if (why := _why_not(exported, engine)) is not None:
        return f"### {known.title}\n\nNot with this export: {known.title} {why}.\n"
    ran = exported.layout.was_run(engine) and serving.adapter is None  # no engine was run with one
    notes = []
    if serving.adapter is not None:
        notes += [
            f"Requests must name the model `{ADAPTER_NAME}`: under its own name the target answers without the adapter, and the "
            "heads draft for another one."
        ]
    if serving.context:
        notes += [
            f"Leave the length at {serving.context} tokens: past it all rotary frequencies of the target change, and {known.title} would take the "
            "others from the first token on."
        ]
    snippets = served.start(serving)
    text = "".join(snippet.text for snippet in snippets)
    given, file = serving.rendered
    if given and shlex.quote(given) not in text:
        notes += [f"Send `chat_template_kwargs` {given} with every request, as the head learned from such prompts."]
    if file and file not in text:
        notes += [f"Let it render prompts by the chat template in `{file}`, as the head's were."]
    notes += served.caveats
    kinds = exported.target.identity.architectures
    if drafts_for(engine, served.needs, kinds) is None:
        notes += [
            f"Nobody has asked {known.title} whether it drafts with such heads for a target of the class {joined(kinds or ())}: see "
            "that it counts drafts."
        ]
    if served.reserved is not None and (word := served.reserved.search(serving.draft.lower())):
        notes += [
            f"**The path of this export holds `{word[0]}`, which {known.title} takes for the method: move the folder first.**"
        ]
    how = "" if ran else ", read from its source"
    parts = [f"### {known.title}\n", f"Held against {known.title} {known.version}{how}.\n"]
    return "\n".join([*parts, *fenced(snippets), *(f"- {note}" for note in notes), ""])


def fenced(snippets: Sequence[Snippet], bash: str = "") -> list[str]:
    """Return lines to paste as blocks of Markdown. bash: a line before each that is for a shell."""
    lines = []
    for snippet in snippets:
        before = f"`{snippet.file}`:\n\n" if snippet.file else bash
        lines.append(f"{before}```{snippet.language}\n{snippet.text}```\n")
    return lines


def _why_not(exported: Exported, engine: str) -> str | None:
    """Return why the engine cannot serve this head and what to do instead; the text follows its name. None where it can."""
    serving = exported.serving
    rule = exported.layout.blocking_rules(exported.files, exported.target, exported.head).get(engine)
    if rule is not None:
        return f"{rule.why} ({rule.what}); {rule.instead}"
    if serving.adapter is not None and not ENGINES[engine].serves_adapters:
        return "is started on the target without its adapter; export with `export.adapter: merge`"
    if (
        why := target_obstacle(exported.layout, engine, serving.target, exported.target.identity.architectures)
    ) is not None:
        return why
    return split_obstacle(engine, exported.files, serving.gpus)
