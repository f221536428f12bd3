"""`draftsmith quality`: tasks of lm-eval, answered by drafters that change what the target writes, and by the target alone.

    draftsmith quality --recipe R --tasks gsm8k,ifeval --limit 200 --output quality.json

lm-eval (EleutherAI's lm-evaluation-harness, the extra `lm-eval`) has the prompts and judges the answers. Its prompts go through the
target's chat template, and the recipe says how tokens are sampled, at each of `evaluate.temperatures`, whatever a task asks for: a
task sets the most tokens of an answer, and the texts at which it ends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.data.conversations.templates import encode, render_text
from draftsmith.decoder.answers import Request
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError, one_line
from draftsmith.eval.drafters.system import SystemUnderTest, Way
from draftsmith.eval.results.conditions import Thinking
from draftsmith.foreign.code import foreign_code
from draftsmith.machine import command_line, environment_json
from draftsmith.progress import Bar
from draftsmith.stages.drafters import at_temperature, load_heads, ways_to_draft
from draftsmith.stages.planning import target_info
from draftsmith.stages.session import Session
from draftsmith.storage import write_json

_ALONE = TargetAlone.name
_WAITING = 4
"""Prompts are decoded in groups of so many batches, so that rows which finish early are taken over."""


class DraftedModel(LM):
    """A target and its drafter, as lm-eval asks a model. Draws are the same for every writer: they depend on the recipe's seed, the
    task and the prompt's number in it. name: as results have it. context: tokens of a prompt and its answer, at most."""

    def __init__(self, session: Session, name: str, way: Way, context: int, sampling: Sampling) -> None:
        super().__init__()
        self.session, self.name, self.way, self.context, self.sampling = session, name, way, context, sampling
        spell = partial(session.tokenizer.decode, skip_special_tokens=False)
        self.thinking = Thinking(spell, session.recipe.evaluate.thinking)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's records."""
        return str(self.session.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt as the target reads it; without the generation prompt it ends within the last message, which is the
        beginning of the answer."""
        begun = {} if add_generation_prompt else {"continue_final_message": True}
        template = self.session.recipe.data.template | begun
        tokenizer = self.session.tokenizer
        return render_text(tokenizer, chat_history, generation_prompt=add_generation_prompt, **template)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts; an answer ends before the first of its task's stop texts. Raises UserError for a prompt that leaves no room
        for an answer."""
        tokenizer = self.session.tokenizer
        rules = [normalize_gen_kwargs(one.args[1], self.session.recipe.evaluate.max_new_tokens) for one in requests]
        seen: Counter[str] = Counter()
        asked = [self._request(one, rule["max_gen_toks"], seen) for one, rule in zip(requests, rules, strict=True)]
        order = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt_ids))
        texts = [""] * len(asked)
        rows = self.session.recipe.evaluate.batch
        with Bar(total=len(asked), desc=f"{self.name} at T={self.sampling.temperature:g}", unit="answer") as bar:
            for start in range(0, len(order), _WAITING * rows):
                places = order[start : start + _WAITING * rows]
                decoded = self.way.decode([asked[i] for i in places], self.sampling, rows)
                for i, answer in zip(places, decoded.generations, strict=True):
                    text = tokenizer.decode(self.thinking.answer(answer), skip_special_tokens=True)
                    ends = (text.split(stop, 1)[0] for stop in rules[i]["until"] if stop)
                    texts[i] = min(ends, key=len, default=text)
                bar.update(len(places))
        return texts

    def _request(self, instance: Instance, most: int, seen: Counter[str]) -> Request:
        name = f"{instance.task_name} {instance.doc_id}"
        seen[name] += 1  # a task may ask for several answers to a prompt
        ids = encode(self.session.tokenizer, instance.args[0])
        room = self.context - len(ids)
        if room < 1:
            raise UserError(
                f"--tasks: a prompt of {instance.task_name} has {len(ids)} tokens, which leaves no room for an answer within the "
                f"{self.context} that target and head read besides a draft: name another task."
            )
        return Request.seeded(f"{name} {seen[name]}", "tasks", ids, min(most, room), self.session.recipe.seed)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not asked for: `check_tasks` refuses such tasks."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not asked for: `check_tasks` refuses such tasks."""
        raise NotImplementedError


def measure_quality(session: Session, names: Sequence[str], limit: int | None, output: Path) -> None:
    """Let every drafter that changes texts, and the target alone, answer the tasks at every temperature of the recipe; write the
    scores to `output`, and print them. limit: prompts of each task. Raises UserError for tasks that cannot be run, and where no
    drafter changes texts."""
    manager = TaskManager()
    for name in names:
        remedy = "`lm-eval ls tasks` lists the names, and a YAML file of your own goes by its path"
        with foreign_code(f"--tasks names {name}, which lm-eval cannot load", remedy):
            tasks = manager.load([name])["tasks"]
        for task in tasks.values():
            if task.OUTPUT_TYPE != "generate_until":
                raise UserError(
                    f"--tasks names {task.task_name}, whose answers are scored by their likelihood ({task.OUTPUT_TYPE}), which no "
                    "drafter has a part in: name tasks that generate text, and score these with lm-eval itself."
                )
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(
                    f"--tasks names {task.task_name}, which runs the code that a model wrote on this machine: name another task."
                )
    spec, target = session.recipe.evaluate, session.target_in(session.recipe.evaluate.dtype)
    heads = load_heads(session.recipe, session.head_folder, target, session.warn)
    compared = session.original is not None
    found = [ways_to_draft(spec, *one, target, session.warn, compared=compared) for one in heads.items()]
    ways = [c for of_head in found for c in of_head]
    by_temperature = {t: _changing(ways, spec.sampling(t)) for t in spec.temperatures}
    if not any(by_temperature.values()):
        raise UserError(
            "No draft of the recipe changes what the target writes, so all would have its scores: give evaluate.drafts one with "
            "acceptance: typical and evaluate.temperatures one above 0, or take a head that tunes its target."
        )
    alone = session.original_of(target)
    reads = [length for head in heads.values() if (length := head.reads.context_length)]
    context = min(alone.context_length, *reads) if reads else alone.context_length
    context -= max(c.num_speculative_tokens for c in ways)
    scores: list[dict[str, Any]] = []
    for temperature, systems in by_temperature.items():
        writers = {_ALONE: Way(alone, TargetAlone())} if systems else {}
        writers |= {c.name: c.way(alone) for c in systems}
        for name, way in writers.items():
            model = DraftedModel(session, name, way, context, spec.sampling(temperature))
            how = {"limit": limit, "apply_chat_template": True, "log_samples": False, "task_manager": manager}
            scored = simple_evaluate(model, tasks=list(names), **how)
            scores += [{"temperature": temperature, "system": name, **one} for one in _scores(scored)]
    settings = {"tasks": list(names), "limit": limit, "dtype": alone.dtype_name, "seed": session.recipe.seed}
    command = command_line()
    facts = {"command": command, **environment_json()}
    about = {"target": asdict(target_info(alone, session.name_of(alone))), "settings": settings}
    write_json(output, {"schema_version": 1, **facts, **about, "scores": scores})
    Console().print(_table(scores))


def _changing(ways: list[SystemUnderTest], sampling: Sampling) -> list[SystemUnderTest]:
    """Return the drafters whose texts differ from the target's at a temperature: lossy ones, where anything is drawn, and one of
    those that are lossless to the same tuned target."""
    changing: list[SystemUnderTest] = []
    for c in at_temperature(ways, sampling):
        lossy = not c.lossless and not sampling.greedy
        if lossy or (c.verifier is not None and not any(k.lossless and k.verifier is c.verifier for k in changing)):
            changing.append(c)
    return changing


def _scores(scored: Any) -> list[dict[str, Any]]:
    """Return every number that lm-eval gives for a task or a group, with its standard error where there is one."""
    scores = []
    for task, values in scored["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{kind}")
                error = float(error) if isinstance(error, int | float) else None
                score = {"task": task, "metric": metric, "filter": kind, "value": float(value), "standard_error": error}
                scores.append(score | {"prompts": scored.get("n-samples", {}).get(task, {}).get("effective")})
    return scores


def _table(scores: Sequence[dict[str, Any]]) -> Table:
    """Return the scores as a table for the terminal, each beside that of the target alone."""
    table = Table(title="Tasks of lm-eval, with the standard error over prompts", title_justify="left")
    for column in ("temperature", "task", "metric", "prompts", "drafter", "score", "target alone"):
        table.add_column(column)
    places = ("temperature", "task", "metric", "filter")
    alone = {tuple(one[key] for key in places): _shown(one) for one in scores if one["system"] == _ALONE}
    for one in scores:
        if one["system"] != _ALONE:
            metric = one["metric"] if one["filter"] == "none" else f"{one['metric']}, {one['filter']}"
            place = tuple(one[key] for key in places)
            cells = (f"{one['temperature']:g}", one["task"], metric, one["prompts"], one["system"])
            table.add_row(*(Text(one_line(str(cell))) for cell in cells), _shown(one), alone[place])
    return table


def _shown(score: dict[str, Any]) -> str:
    error = score["standard_error"]
    return f"{score['value']:.3f}" + ("" if error is None else f" ± {error:.3f}")
