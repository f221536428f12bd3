"""`draftsmith certify`: whether drafted texts are the target's own, by tests that must find every known fault.

draftsmith certify --recipe R
draftsmith certify --recipe R --url http://DRAFTS:8000 --url http://ALONE:8001
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from itertools import islice, zip_longest

from draftsmith.cli.actions import refuse_redo, session_of
from draftsmith.cli.boundary import put
from draftsmith.cli.gating import MISSED
from draftsmith.decoder.answers import Request
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.certificate.certificate import (
    CERTIFICATE_MARK,
    Design,
    Draw,
    Greedy,
    Judge,
    Outcome,
    Pairs,
    checks_of,
    draw_decoded,
    exact_pairs,
    judge_greedy,
    make_certificate,
    page,
)
from draftsmith.eval.certificate.controls import CONTROLS, Control
from draftsmith.eval.certificate.served import SampledServer, compare_greedy
from draftsmith.eval.drafters.system import Way
from draftsmith.eval.measure.texts import check_lossless
from draftsmith.foreign.records import Journal
from draftsmith.heads.formats.recognise import head_digest
from draftsmith.machine import command_line, environment_json
from draftsmith.progress import Bar, say
from draftsmith.stages.drafters import at_temperature, load_fitting, ways_to_draft
from draftsmith.stages.evaluation import prompts_of, served_prompts
from draftsmith.stages.session import Session
from draftsmith.storage import check_file, check_ours, fingerprint, write_json, write_text
from draftsmith.target.folder import fingerprint_directory
from draftsmith.target.pretrained import weights_directory

_TOKENS = 8
"""The most tokens of an answer that are tested where nobody asks for more."""
_ROWS = 128
"""Samples of a batch, about."""


class _Decoder:
    """The built-in decoder with the recipe's head, in all its ways to draft. facts: of target and head, for the certificate."""

    controls: Sequence[Control] = CONTROLS

    def __init__(self, session: Session) -> None:
        folder, self._spec, self._seed = session.head_folder, session.recipe.evaluate, session.recipe.seed
        loaded = session.target_in(self._spec.dtype)
        head = load_fitting(folder, loaded, session.warn)
        self._ways = ways_to_draft(self._spec, head.method, head, loaded, session.warn, compared=False)
        if not self._ways:
            raise UserError(f"evaluate.drafts names no way to draft for the head in {folder}: add {{tree: chain}}.")
        if lossy := [c.name for c in self._ways if not c.lossless]:
            raise UserError(
                f"evaluate.drafts has {lossy[0]}, whose acceptance is lossy by design, so that there is nothing to certify: leave it out, "
                "or set its acceptance to lossless."
            )
        self._target = self._ways[0].verified_by(loaded)
        self.requests = prompts_of(session, self._target).requests
        self.longest = max(c.num_speculative_tokens for c in self._ways)
        self.ways = [asdict(c.info) for c in self._ways]
        self.facts = {
            "subject": f"The {head.method} head in {folder} on {session.recipe.target.path}, in draftsmith's decoder",
            "dtype": self._target.dtype_name,
            "target": self._target.fingerprint,
            "head": head_digest(folder),
        }

    def exact_after(self, prompts: Sequence[Request]) -> Callable[[Sampling], Sequence[Pairs]]:
        """Return what computes the exact probabilities of the first two tokens after each prompt."""
        return cache(lambda sampling: [exact_pairs(self._target, prompt, sampling) for prompt in prompts])

    def names(self, sampling: Sampling) -> list[str]:
        """Name the ways to draft that differ at a setting."""
        return [c.name for c in at_temperature(self._ways, sampling)]

    def draw(self, name: str, prompts: Sequence[Request], design: Design) -> Draw:
        """Return how samples are drawn; no name for the target alone."""
        way = next((c.way(self._target) for c in self._ways if c.name == name), Way(self._target, TargetAlone()))
        return draw_decoded(way, prompts, design.tokens, design.repeats, self._seed, name)

    def greedy(self, journal: Journal) -> list[Greedy]:
        """Compare greedy answers with the target's own."""
        greedy = self._spec.sampling(0.0)
        found = check_lossless(self._target, at_temperature(self._ways, greedy), self.requests, greedy, journal)
        return [judge_greedy(name, one["overall"]) for name, one in found.items()]


class _Servers:
    """A server that drafts, and one that does not."""

    controls: Sequence[Control] = ()
    longest = _TOKENS

    def __init__(self, session: Session, urls: Sequence[str], names: Sequence[str], sampling: Sampling) -> None:
        self._spec, self._seed, dtype = session.recipe.evaluate, session.recipe.seed, session.recipe.target.dtype
        self._dtype = "bfloat16" if dtype == "auto" else dtype  # of the servers, who do not tell theirs
        self.requests = served_prompts(session).requests
        probe, known = self.requests[0], names or [session.target_path]
        self._drafts, self._alone = (SampledServer(url, known, probe, sampling) for url in urls)
        self.ways = [one.find_engine() for one in (self._drafts, self._alone)]
        self.facts = {
            "subject": f"The server {self._drafts.url} against {self._alone.url}, both with {session.recipe.target.path}",
            "dtype": self._dtype,
            "target": fingerprint_directory(weights_directory(session.target_path)),
            "head": None,
        }

    def exact_after(self, prompts: Sequence[Request]) -> None:
        """Of a server nothing is known exactly."""

    def names(self, sampling: Sampling) -> list[str]:
        """Name the server that drafts."""
        return [self._drafts.url]

    def draw(self, name: str, prompts: Sequence[Request], design: Design) -> Draw:
        """Return how samples are drawn; no name for the server that does not draft."""
        server = self._drafts if name else self._alone
        return server.draw(prompts, design.tokens, design.repeats, self._seed, name)

    def greedy(self, journal: Journal) -> list[Greedy]:
        """Compare the greedy answers of both."""
        found = compare_greedy(self._drafts, self._alone, self.requests, self._spec.sampling(0.0), self._dtype)
        return [judge_greedy(self._drafts.url, found)]


def _shortest(requests: Sequence[Request], count: int) -> list[Request]:
    """Return the shortest prompts of each slice in turn, as they are read again and again."""
    by_slice: dict[str, list[Request]] = {}
    for request in sorted(requests, key=lambda r: len(r.prompt_ids)):
        by_slice.setdefault(request.slice, []).append(request)
    turns = (one for turn in zip_longest(*by_slice.values()) for one in turn if one is not None)
    return list(islice(turns, count))


def certify(own: Namespace, words: list[str]) -> int:
    """Write a certificate and its page; return 3 where it is not given."""
    refuse_redo("certify", words, "what is there of a certificate goes on")
    if len(own.url) not in (0, 2) or len({url.rstrip("/") for url in own.url}) < len(own.url):
        raise UserError(
            f"--url is given {len(own.url)} times ({', '.join(own.url)}): give the server that drafts, then another one that serves the same target alone."
        )
    if own.url and own.head is not None:
        raise UserError("--head is for this decoder, and the servers of --url have their own: leave it out.")
    if own.model and not own.url:
        raise UserError("--model is what servers call the target: name them with --url, or leave it out.")
    session = session_of("certify", words, [], own.head)
    check_file("--output", own.output, (".json",), CERTIFICATE_MARK)
    journal_file, page_file = (own.output.with_suffix(ending) for ending in (".journal", ".md"))
    check_ours("--output", page_file, r"\A# Losslessness certificate: ")
    check_ours("--output", journal_file, r'\A[0-9a-f]{8} \["')
    spec = session.recipe.evaluate
    settings = [spec.sampling(t) for t in spec.temperatures if t > 0]
    if not settings:
        raise UserError(
            "evaluate.temperatures holds 0 alone, where nothing is drawn that a test of distributions could look at: add one above 0, "
            "such as [0.0, 1.0]."
        )
    subject = _Servers(session, own.url, own.model, settings[0]) if own.url else _Decoder(session)
    prompts = _shortest(subject.requests, own.prompts)
    if len(prompts) < 2:
        raise UserError(
            "certify takes two prompts or more, as one fault is another prompt's prefix: raise --prompts, or add some."
        )
    ways = [(sampling, name) for sampling in settings for name in subject.names(sampling)]
    if own.tokens is not None and own.tokens < 4:
        raise UserError(
            f"--tokens is {own.tokens}, but a draft and what follows it have 4 at least: give as many, or leave it out."
        )
    tokens = own.tokens or max(4, min(_TOKENS, subject.longest + 2))
    tests, repeats = len(ways) * checks_of(tokens), max(1, _ROWS // len(prompts))
    design = Design(own.level, own.power, own.distance, len(prompts), tokens, tests, repeats)
    texts = [(r.sample_id, r.prompt_ids, r.max_new_tokens) for r in subject.requests]
    # Samples of another version, or of a server that was changed, are no part of it.
    made = environment_json()
    by = [made["versions"], made["hardware"], subject.ways]
    of = [subject.facts, texts, settings, asdict(design), session.recipe.seed, by]
    journal = Journal(journal_file, fingerprint(of))
    greedy = subject.greedy(journal)
    tested = _test(subject, design, prompts, ways, journal)
    about = {
        **subject.facts,
        "prompts": [p.sample_id for p in prompts],
        "settings": fingerprint([settings, texts]),
        "command": command_line(),
        **made,
    }
    certificate = make_certificate(about, design, greedy, tested)
    write_json(own.output, asdict(certificate))
    write_text(page_file, page(certificate))
    journal_file.unlink(missing_ok=True)
    put(page(certificate))
    return 0 if certificate.given else MISSED


def _test(
    subject: _Decoder | _Servers,
    design: Design,
    prompts: Sequence[Request],
    ways: Sequence[tuple[Sampling, str]],
    journal: Journal,
) -> list[Outcome]:
    """Test every way to draft, and first say how long that takes."""
    heats = {sampling for sampling, _ in ways}
    with Bar(total=design.samples * (len(heats) + len(ways)), unit="sample") as bar:
        judge = Judge(design, subject.draw("", prompts, design), journal, bar, subject.exact_after(prompts))
        began, known = time.monotonic(), len(journal.values)
        for sampling, name in ways:
            judge.batch("target alone", judge.reference, sampling, None, 0)
            judge.batch(name, subject.draw(name, prompts, design), sampling, None, 0)
        if len(journal.values) == known + len(heats) + len(ways):
            minutes, faults = (time.monotonic() - began) * design.batches / 60, len(subject.controls)
            more = f", and up to {minutes * faults:.0f} more where faults are hard to find" if faults else ""
            say(f"certify: {design.samples:,} samples of each side in about {minutes:.0f} minutes{more}")
        return [
            judge.test(name, subject.draw(name, prompts, design), sampling, subject.controls) for sampling, name in ways
        ]
