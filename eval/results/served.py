"""What was measured of running servers that answered the same prompts in turns: the part `served` of result.json."""

from dataclasses import dataclass

from draftsmith.eval.results.intervals import Percentiles
from draftsmith.machine import Hardware


@dataclass(frozen=True)
class ServedServer:
    """A running server. engine: with its version, as far as it says. model: the name that it serves the target by."""

    url: str
    engine: str
    model: str


@dataclass(frozen=True)
class Failure:
    """A request without a whole answer. prompt: its id. why: a sentence."""

    prompt: str
    why: str


@dataclass(frozen=True)
class ServedAcceptance:
    """What a server accepted, by its own records. tau: tokens of a round, bonus included. tau_interval: 95%, over answers. drafted: tokens
    of a round. acceptance_at: the share of rounds that accepted the i-th drafted token. by_answers: told with every answer, else by the
    counters of /metrics, which count what others ask meanwhile too."""

    rounds: float
    tau: float
    tau_interval: tuple[float, float] | None
    drafted: float | None
    acceptance_at: tuple[float, ...] | None
    by_answers: bool


@dataclass(frozen=True)
class ServedSide:
    """One server at one concurrency; seconds are those of the client's clock.

    asked, answered: requests. unfinished: of those asked, or still to be asked, when the time for everything was up. failures: the others
    without a whole answer. tokens: of the answers. seconds: while it was asked; tok_s: their ratio, all requests together. ttft_s: until
    the first chunk. latency_s: until the last. token_s: of a request, per token after the first. wait_s: between the chunks of an answer.
    speedup: over the first server, seconds per token on the prompts that both answered, `paired` of them; speedup_interval: 95%, over
    prompts. predicted: the speedup that costs and predicted_tau give: of the report where one is named, else the served one.
    """

    asked: int
    answered: int
    unfinished: int
    failures: tuple[Failure, ...]
    tokens: int
    seconds: float
    tok_s: float | None
    ttft_s: Percentiles | None
    latency_s: Percentiles | None
    token_s: Percentiles | None
    wait_s: Percentiles | None
    acceptance: ServedAcceptance | None
    paired: int = 0
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    predicted: float | None = None
    predicted_tau: float | None = None


@dataclass(frozen=True)
class ServedLevel:
    """What `concurrency` requests at once take. sides: one per server, in their order."""

    concurrency: int
    sides: tuple[ServedSide, ...]


@dataclass(frozen=True)
class Served:
    """Servers that answered the same prompts in turns; the first is what the others are compared with.

    prompts: asked at every concurrency, `repeats` times. injected: the servers accepted by rates that were given to them, so that their
    texts are worth nothing. client: the machine that asked. command, commit, date: as in result.json.
    """

    servers: tuple[ServedServer, ...]
    levels: tuple[ServedLevel, ...]
    temperature: float
    max_tokens: int
    prompts: int
    repeats: int
    injected: bool
    client: Hardware
    command: str
    commit: str | None
    date: str
