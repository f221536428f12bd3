"""The evaluation of a trained head: decode, simulate, compare, and write result.json and the reports."""

import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.data.conversations import Conversation, load_conversations
from draftsmith.data.regenerate import prepare_prompts
from draftsmith.errors import UserError
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.decode import Generation, Request, decode_batch
from draftsmith.eval.draft import TargetAlone
from draftsmith.eval.lossless import check_lossless
from draftsmith.eval.measure import Text, collect_texts, is_looping, run_systems, summarize, time_generate
from draftsmith.eval.noise import row_key
from draftsmith.eval.report import write_report
from draftsmith.eval.result import (
    Drafter,
    Example,
    Measures,
    Piece,
    Result,
    Settings,
    SweepPoint,
    TargetInfo,
    environment,
    read_result,
    write_result,
)
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.tally import total
from draftsmith.eval.teacher_forced import simulate_generations
from draftsmith.heads.registry import METHODS
from draftsmith.heads.target import Target
from draftsmith.session import Session, say
from draftsmith.stages import load_best


def evaluate_stage(session: Session, *, decode: bool = True, head_folder: Path | None = None) -> list[Path]:
    """Evaluate the head at every temperature of the recipe; return the result files. Reuses finished ones."""
    recipe, spec = session.recipe, session.recipe.evaluate
    folder = recipe.run_dir / "evaluation"
    inputs = {
        "train": session.upstream("train"),
        "head": str(head_folder or ""),
        "evaluate": asdict(spec),
        "seed": recipe.seed,
        "decode": decode,
    }
    paths = [folder / f"t{temperature:g}" / "result.json" for temperature in spec.temperatures]
    if "evaluate" in session.redo:
        # Refuse a head of another target before the old results are removed.
        load_best(session, session.target, head_folder)
    if not session.begin("evaluate", inputs):
        target = session.load_target(spec.dtype if spec.dtype != "auto" else recipe.target.dtype)
        requests, conversations = make_requests(session, target)
        lossless = _lossless(session, requests, head_folder) if decode and spec.lossless else {}
        for temperature, path in zip(spec.temperatures, paths, strict=True):
            if not path.exists():
                sampling = Sampling(temperature, spec.top_k, spec.top_p)
                evaluator = _Evaluator(session, target, requests, conversations, head_folder)
                result = evaluator.decoded(sampling, lossless) if decode else evaluator.simulated(sampling)
                write_result(path, result)
        session.run.finish("evaluate", {"results": [str(path) for path in paths]})
    write_report([read_result(path) for path in paths], folder)
    return paths


def make_requests(session: Session, target: Target) -> "tuple[list[Request], dict[str, Conversation]]":
    """Return the evaluation prompts as requests, and the conversations by id."""
    spec = session.recipe.evaluate
    sources = list(spec.prompts)
    if not sources:
        if session.recipe.target.path != "embedded":
            raise UserError(
                "evaluate.prompts is empty: name prompt sets (JSONL with id, slice and messages) to measure on."
            )
        sources = [str(session.embedded.prompts)]
    chosen: list[Conversation] = []
    seen: dict[str, int] = defaultdict(int)
    for conversation in load_conversations(sources):
        seen[conversation.slice] += 1
        if spec.per_slice is None or seen[conversation.slice] <= spec.per_slice:
            chosen.append(conversation)
    prompts = prepare_prompts(
        session.tokenizer,
        chosen,
        max_new_tokens=lambda name: spec.max_new_tokens_by_slice.get(name, spec.max_new_tokens),
        max_length=target.context_length - spec.max_k,
        seed=session.recipe.seed,
        template=session.recipe.data.template,
    )
    return [p.request for p in prompts], {c.id: c for c in chosen}


def _lossless(session: Session, requests: Sequence[Request], head_folder: Path | None) -> dict[str, Any]:
    """Compare greedy texts with and without the draft in float32, where they must be equal."""
    spec = session.recipe.evaluate
    target = session.load_target("float32")
    head = load_best(session, target, head_folder)
    drafter = METHODS[session.recipe.method].drafter(head, spec.num_speculative_tokens)
    say(f"evaluate: greedy equality of {len(requests)} prompts in float32")
    return check_lossless(target, drafter, head, requests)


class _Evaluator:
    """What the evaluations at all temperatures have in common."""

    def __init__(
        self,
        session: Session,
        target: Target,
        requests: Sequence[Request],
        conversations: dict[str, Conversation],
        head_folder: Path | None,
    ) -> None:
        self.session, self.target, self.requests = session, target, list(requests)
        self.recipe, self.spec = session.recipe, session.recipe.evaluate
        self.conversations = conversations
        self.head = load_best(session, target, head_folder)
        self.method = METHODS[self.recipe.method]

    def decoded(self, sampling: Sampling, lossless: dict[str, Any]) -> Result:
        """Decode and simulate."""
        spec, name = self.spec, self.recipe.method
        # Above temperature 0 every repeat draws new answers; greedy ones would only repeat themselves.
        repeats = [
            [replace(r, key=row_key(self.recipe.seed, "evaluate", repeat, r.sample_id)) for r in self.requests]
            for repeat in range(spec.repeats)
        ]
        factories = {name: lambda k: self.method.drafter(self.head, k)}
        longest = sorted(self.requests, key=lambda r: len(r.prompt_ids))[len(self.requests) // 2]
        costs = measure_costs(self.target, factories, longest.prompt_ids, sampling, max_k=spec.max_k, rows=spec.batch)
        bar = tqdm(
            total=spec.repeats * len(self.requests), desc=f"decoding at T={sampling.temperature:g}", unit="prompt"
        )
        with bar:
            timings = run_systems(
                self.target,
                factories,
                repeats,
                sampling,
                num_speculative_tokens=spec.num_speculative_tokens,
                batch=spec.batch,
                on_batch=bar.update,
            )
        generate = time_generate(self.target, self.requests, sampling) if spec.generate and spec.batch == 1 else {}
        texts = collect_texts(self.target, self.head, timings[name], sampling, spec.num_speculative_tokens, spec.max_k)
        greedy = lossless if sampling.greedy else {}
        drafter = summarize(name, texts, timings, costs, greedy, generate, spec.num_speculative_tokens)
        return self._result(sampling, {name: drafter}, costs=costs, examples=self._examples(texts))

    def simulated(self, sampling: Sampling) -> Result:
        """Let the target alone answer in large batches, then simulate; no clock is read."""
        spec, name = self.spec, self.recipe.method
        generations: list[Generation] = []
        order = sorted(self.requests, key=lambda r: len(r.prompt_ids))
        with tqdm(total=len(order), desc=f"answers at T={sampling.temperature:g}", unit="prompt") as bar:
            for start in range(0, len(order), 32):
                decoded = decode_batch(self.target, TargetAlone(), order[start : start + 32], sampling)
                generations += decoded.generations
                bar.update(len(decoded.generations))
        tallies = simulate_generations(self.target, self.head, generations, sampling, spec.max_k)
        k = spec.num_speculative_tokens

        def scope(slice_name: str | None) -> Measures:
            places = [i for i, g in enumerate(generations) if slice_name in (None, g.request.slice)]
            sweep = [total((tallies[i][k - 1] for i in places), k) for k in range(1, spec.max_k + 1)]
            chosen = sweep[k - 1]
            return Measures(
                prompts=len(places),
                tokens=int(chosen.tokens),
                tau_simulated=chosen.tau,
                acceptance_rate=chosen.acceptance_rate,
                acceptance_at_simulated=tuple(chosen.acceptance_at),
                alpha_at_simulated=tuple(chosen.alpha_at),
                k_sweep=tuple(SweepPoint(n + 1, t.tau, t.acceptance_rate) for n, t in enumerate(sweep)),
                looping=sum(is_looping(generations[i].output_ids) for i in places) / len(places),
            )

        slices = dict.fromkeys(r.slice for r in self.requests)
        drafter = Drafter(scope(None), {slice_name: scope(slice_name) for slice_name in slices})
        return self._result(sampling, {name: drafter})

    def _result(self, sampling: Sampling, drafters: dict[str, Drafter], **extra: Any) -> Result:
        spec, target = self.spec, self.target
        return Result(
            command=shlex.join(["draftsmith", *sys.argv[1:]]),
            **environment(),
            recipe=asdict(self.recipe),
            target=TargetInfo(
                path=self.recipe.target.path,
                fingerprint=target.fingerprint,
                parameters=sum(p.numel() for p in target.model.parameters()),
                num_layers=target.num_layers,
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
            ),
            settings=Settings(
                temperature=sampling.temperature,
                top_k=sampling.top_k or None,
                top_p=sampling.top_p if sampling.top_p < 1 else None,
                num_speculative_tokens=spec.num_speculative_tokens,
                batch=spec.batch,
                dtype=str(target.dtype).removeprefix("torch."),
                seed=self.recipe.seed,
                repeats=spec.repeats,
            ),
            drafters=drafters,
            **extra,
        )

    def _examples(self, texts: Sequence[Text]) -> tuple[Example, ...]:
        """The first answer of each slice, token by token, with the draft position that each token came from."""
        allowed = self.spec.example_slices
        first: dict[str, Generation] = {}
        for text in texts:
            request = text.generation.request
            if not allowed or request.slice in allowed:
                first.setdefault(request.slice, text.generation)
        return tuple(
            Example(self.recipe.method, name, _prompt_text(self.conversations[g.request.sample_id]), self._pieces(g))
            for name, g in first.items()
        )

    def _pieces(self, generation: Generation) -> tuple[Piece, ...]:
        positions: list[int | None] = [None]
        for round_ in generation.rounds:
            positions += [*range(round_.accepted), None]
        decode = self.session.tokenizer.decode
        # Where the text ended on an accepted draft, the last round has no token of the target's own.
        return tuple(Piece(decode([i]), p) for i, p in zip(generation.output_ids, positions, strict=False))


def _prompt_text(conversation: Conversation) -> str:
    return "\n\n".join(str(m.get("content") or "") for m in conversation.prompt())
