"""Let a target answer prompts where nothing is timed, and keep the answers in a journal, so that an interrupted command does not
make them again."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from draftsmith.decoder.answers import Decoded, Generation, Request, Round
from draftsmith.decoder.decode import decode
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.foreign.records import Journal
from draftsmith.progress import Bar
from draftsmith.target.target import Target

SIMULATED_BATCH = 32
"""Answers made together where nothing is timed."""
_KEPT_BATCHES = 4
"""Batches of them that are kept together: those of an interrupted one are made again."""


def answer_alone(
    target: Target, requests: Sequence[Request], sampling: Sampling, journal: Journal, rows: int = SIMULATED_BATCH
) -> list[Generation]:
    """Return the target's own answers, in the order of `requests`. rows: answered at a time, those with the shortest prompts first."""
    order = sorted(requests, key=lambda request: len(request.prompt_ids))
    with Bar(total=len(order), desc=f"answers at T={sampling.temperature:g}", unit="answer") as bar:
        name, size = f"answers of {target.fingerprint}", _KEPT_BATCHES * rows
        made = answer_in_parts(target, TargetAlone(), order, sampling, journal, name, rows=rows, size=size, bar=bar)
    by_request = {id(generation.request): generation for generation in made}
    return [by_request[id(request)] for request in requests]


def answer_in_parts(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    sampling: Sampling,
    journal: Journal,
    name: str,
    *,
    rows: int,
    size: int,
    bar: Bar,
) -> list[Generation]:
    """Return the answers to `requests`, made `rows` at a time. Each `size` of them become a part of the journal, under `name`."""
    answers: list[Generation] = []
    for start in range(0, len(requests), size):
        chunk = requests[start : start + size]
        # The size may be another than when the journal was begun, and the chunks with it.
        part = f"{name}/{start}+{len(chunk)}"
        if (kept := journal.get(part)) is not None:
            answers += unpack_decoded(kept, chunk).generations
            bar.skip(len(chunk))
            continue
        made: dict[int, Generation] = {}
        for generation in decode(target, drafter, chunk, sampling, rows):
            made[id(generation.request)] = generation
            bar.update()
        answers += [made[id(request)] for request in chunk]
        journal.add(part, pack_decoded(Decoded(answers[start:], {})))
    return answers


def pack_decoded(decoded: Decoded) -> dict[str, Any]:
    """Return what was decoded as JSON, without the requests."""
    generations = [
        {name: value for name, value in vars(g).items() if name != "request"}
        | {"rounds": [asdict(r) for r in g.rounds]}
        for g in decoded.generations
    ]
    return {**vars(decoded), "generations": generations, "seconds": dict(decoded.seconds)}


def unpack_decoded(value: dict[str, Any], requests: Sequence[Request]) -> Decoded:
    """Return what `pack_decoded` packed of the answers to `requests`."""
    generations = [
        Generation(request, **{**g, "rounds": [Round(**{**r, "levels": tuple(r["levels"])}) for r in g["rounds"]]})
        for request, g in zip(requests, value["generations"], strict=True)
    ]
    return Decoded(**{**value, "generations": generations})
