"""What a longer context does to acceptance: the same questions behind longer and longer chats, and each head with windows beside its own.
python -m scripts.bench.contexts --head eagle3=HEAD --head dflash2=HEAD --output docs/results/contexts.json -- --recipe R --evaluate.prompts FILES

The last exchanges of the recipe's conversations (data.sources) are taken as earlier turns of a chat, one after the other, until it has so many
tokens with the question. Words behind -- are those of an evaluation, which simulates here: times play no part.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.data.conversations.templates import read_tokenizer
from draftsmith.errors import UserError
from draftsmith.eval.results.result import read_result
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.evaluation import result_files
from draftsmith.storage import write_text
from scripts.bench.commands import facts_of, keep, run_command


def chats(
    questions: Sequence[Conversation], earlier: Sequence[Conversation], lengths: Sequence[int], tokenizer: Any
) -> Iterator[Conversation]:
    """Yield every question behind a chat of at most each length, in tokens; 0 is the question alone. A chat grows at its beginning, so
    that what stands before the question is the same at every length."""
    for number, question in enumerate(questions):
        prompt = list(question.prompt())
        rest = iter(earlier[number :: len(questions)])
        yield replace(question, id=f"{question.id}-0", slice="0", messages=tuple(prompt))
        for length in sorted(lengths):
            for one in rest:
                longer = [*one.messages[-2:], *prompt]
                text = tokenizer.apply_chat_template(longer, tokenize=False, add_generation_prompt=True)
                if len(tokenizer(text, add_special_tokens=False)["input_ids"]) > length:
                    break
                prompt = longer
            yield replace(question, id=f"{question.id}-{length}", slice=str(length), messages=tuple(prompt))


def main(argv: list[str]) -> int:
    """Make the prompts, evaluate the heads on them, and keep tau by length and window."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.contexts", description=__doc__)
    named = "a head, or its run (repeatable); the first goes by its method"
    parser.add_argument("--head", action="append", required=True, metavar="NAME=FOLDER", help=named)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 7168], help="of contexts, in tokens"
    )
    parser.add_argument("--windows", type=int, nargs="*", default=[512], help="beside each head's own attention")
    parser.add_argument("--questions", type=int, default=2, help="of each slice of the recipe's prompts")
    parser.add_argument("--folder", type=Path, default=Path("runs/contexts"))
    parser.add_argument("--output", type=Path)
    split = argv.index("--") if "--" in argv else len(argv)
    own, words = parser.parse_args(argv[:split]), argv[split + 1 :]
    heads = dict(word.partition("=")[::2] for word in own.head)
    recipe = parse_recipe(words)
    by_slice: dict[str, list[Conversation]] = {}
    for one in load_conversations(recipe.evaluate.prompts):
        by_slice.setdefault(one.slice, []).append(one)
    questions = [one for found in by_slice.values() for one in found[: own.questions]]
    read = load_conversations(recipe.data.sources, limit=200 * len(questions))
    earlier = [c for c in read if [m["role"] for m in c.messages[-2:]] == ["user", "assistant"]]
    file = own.folder / "prompts.jsonl"
    tokenizer = read_tokenizer(recipe.target.path)
    lines = [
        json.dumps({"id": c.id, "slice": c.slice, "messages": c.messages})
        for c in chats(questions, earlier, own.lengths, tokenizer)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "\n".join(lines) + "\n")
    (_, first), *others = heads.items()
    drafts = [{"tree": "chain"}, *({"tree": "chain", "window": window} for window in own.windows)]
    keys = {
        "evaluate.prompts": [str(file)],
        "evaluate.per_slice": len(questions),
        "evaluate.drafts": drafts,
        "evaluate.beside": dict(others),
    }
    more = [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]
    evaluation = [*words, "--output_dir", str(own.folder / "run"), *more]
    if last := run_command("evaluate", [*evaluation, "--head", first, "--no-decode"], own.folder / "evaluation.log"):
        raise UserError(f"draftsmith evaluate failed ({last}): its whole log is {own.folder / 'evaluation.log'}.")
    facts = facts_of("contexts", argv) | {
        "lengths": [0, *sorted(own.lengths)],
        "questions": len(questions),
        "temperatures": {},
    }
    for path in result_files(parse_recipe(evaluation), decode=False):
        result = read_result(path)
        facts["temperatures"][f"{result.settings.temperature:g}"] = {
            name: {
                "draft": None if drafter.draft is None else asdict(drafter.draft),
                "tau": {at: (m.tau_simulated, m.tau_simulated_interval) for at, m in drafter.slices.items()},
            }
            for name, drafter in result.drafters.items()
        }
    return keep(own.output, facts)


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except UserError as error:
        raise SystemExit(f"contexts: {error}") from None
