"""What is served in the check of the engines: targets, their prompts, and trained heads and draft models beside them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.eval.decode.decode import Generation, Request
from draftsmith.eval.decode.draft import Drafter
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.drafters.draft_model import DraftModel, simulate_draft_model
from draftsmith.eval.measure.machine import available_cores
from draftsmith.eval.simulate.texts import Simulation, simulate_generations
from draftsmith.files import fingerprint
from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.registry import find_method
from draftsmith.heads.target.target import Target, load_target
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.evaluation import make_requests
from draftsmith.stages.gguf import LAYOUT as LLAMA_CPP_LAYOUT
from draftsmith.stages.pipeline import make_stages
from draftsmith.stages.session import Session, say
from scripts.bench.embedded.training import TrainingSettings, train_target

DRAFT_MODEL = "draft model"
SHORT = (
    *("--data.limit", "800", "--data.heldout", "20", "--train.epochs", "6"),
    *("--train.max_steps", "120", "--train.evaluations", "1"),
)
"""Training that is enough for drafts to be accepted, which is all that a comparison needs."""


@dataclass(frozen=True)
class HeadPlan:
    """A head to train and serve: its name, method, further words of the recipe, and the layouts it is served from."""

    name: str
    method: str
    words: tuple[str, ...]
    layouts: tuple[str, ...]


_DATA_KEYS = ("seed", "target", "data", "answers", "features")
_BOTH = ("eagle3", "eagle3_speculators")
_SHORTER = ("--train.max_steps", "60")
PLANS = (
    HeadPlan("eagle3", "eagle3", (), (*_BOTH, LLAMA_CPP_LAYOUT)),
    HeadPlan(
        "eagle3 norm_before_residual, W=512",
        "eagle3",
        ("--head.norm_before_residual", "true", "--head.draft_vocab_size", "512", *_SHORTER),
        (*_BOTH, LLAMA_CPP_LAYOUT),
    ),
    HeadPlan(
        "eagle3 norm_before_fc", "eagle3", ("--head.norm_before_fc", "true", *_SHORTER), (*_BOTH, LLAMA_CPP_LAYOUT)
    ),
    HeadPlan("eagle3 fc_norm", "eagle3", ("--head.fc_norm", "true", *_SHORTER), _BOTH),
    HeadPlan("eagle3 norm_output", "eagle3", ("--head.norm_output", "true", *_SHORTER), _BOTH),
    HeadPlan(
        "eagle3 fc_norm, norm_output",
        "eagle3",
        ("--head.fc_norm", "true", "--head.norm_output", "true", *_SHORTER),
        ("eagle3",),
    ),
    HeadPlan(
        "eagle3 of 2 layers, sliding window of 32",
        "eagle3",
        ("--head.num_hidden_layers", "2", "--head.sliding_window", "32", *_SHORTER),
        _BOTH,
    ),
    HeadPlan(
        "eagle3 of width 64",
        "eagle3",
        (
            *("--head.hidden_size", "64", "--head.train_embeddings", "true"),
            *("--head.num_attention_heads", "2", "--head.num_key_value_heads", "1"),
        ),
        (*_BOTH, LLAMA_CPP_LAYOUT),
    ),
    HeadPlan("peagle", "peagle", (), ("peagle", "peagle_speculators")),
    HeadPlan("eagle1", "eagle1", (), ("eagle1",)),
    # A block of K + 1 slots, since engines fill in no more of it than they draft.
    HeadPlan("dflash", "dflash", ("--head.block_size", "6"), ("dflash_llama_cpp",)),
    # On CPUs vLLM 0.32 takes the first layer's norm of keys for the context of all layers, so one layer is what agrees.
    HeadPlan(
        "dflash of one layer",
        "dflash",
        ("--head.block_size", "6", "--head.num_layers", "1", "--head.draft_vocab_size", "512", *_SHORTER),
        ("dflash",),
    ),
    HeadPlan("dspark", "dspark", ("--head.block_size", "5"), ("dspark_llama_cpp",)),
    HeadPlan("draft model, trained", "draft_model", (), ("draft_model",)),
    HeadPlan("medusa", "medusa", (), ("medusa_vllm",)),
    HeadPlan(
        "medusa on the target's projection, 2 blocks",
        "medusa",
        ("--head.original_lm_head", "true", "--head.num_layers", "2", "--export.layout", "medusa_vllm", *_SHORTER),
        ("medusa_vllm",),
    ),
)


@dataclass(frozen=True)
class Candidate:
    """What drafts. head: a head, or None where `model` drafts. folder: of the draft model. layouts: those it is exported
    to."""

    name: str
    method: str
    layouts: tuple[str, ...]
    head: DraftHead | None = None
    model: Target | None = None
    folder: Path | None = None

    @property
    def max_speculative_tokens(self) -> int | None:
        """The longest draft, None where there is no limit."""
        return None if self.head is None else self.head.max_speculative_tokens

    def drafter(self, target: Target, num_speculative_tokens: int, greedy_drafts: bool = True) -> Drafter:
        """Return it as our decoder takes it, drafting greedily as engines do, or from its distribution."""
        if self.head is None:
            assert self.model is not None
            return DraftModel(self.model, num_speculative_tokens, target.vocab_size, greedy_drafts=greedy_drafts)
        return find_method(self.head.method).make_drafter(
            self.head, num_speculative_tokens, greedy_drafts=greedy_drafts
        )

    def simulate(
        self, target: Target, generations: Sequence[Generation], sampling: Sampling, max_k: int, greedy_drafts: bool
    ) -> Simulation:
        """Simulate chains of 1..max_k of its drafts on finished answers."""
        run: Callable[..., Simulation]
        if self.head is None:
            assert self.model is not None
            run = partial(simulate_draft_model, target, self.model)
        else:
            run = partial(simulate_generations, target, self.head)
        return run(generations, sampling, max_k, greedy_drafts=greedy_drafts)


@dataclass(frozen=True)
class Subject:
    """A target in float32, its folder, the prompts, and what drafts for it."""

    name: str
    target: Target
    folder: Path
    requests: list[Request]
    candidates: list[Candidate]


def train_subject(
    recipes: str, work: Path, heads: Mapping[str, Path], only: Sequence[str], words: Sequence[str]
) -> Subject:
    """Train what `recipes/*/<recipes>.yaml` describe, briefly, and return it with the recipe's prompts.

    work: where answers, features and heads are kept between runs. heads: finished ones, by the name of their plan. only:
    names to take, all if empty. words: further words for every recipe, the last of equal ones counts.
    """
    plans = [plan for plan in PLANS if not only or plan.name in only]
    session = _session("eagle3", recipes, work, words)
    target = session.load_target("float32")
    folders = dict(heads) | _train_all(
        [plan for plan in plans if plan.name not in heads], recipes, session, work, words
    )
    candidates = []
    for plan in plans:
        head = load_head(folders[plan.name], target).eval()
        candidates.append(Candidate(plan.name, head.method, plan.layouts, head=head))
    if not only or DRAFT_MODEL in only:
        candidates.append(_draft_model(session, work))
    requests, _ = make_requests(session, target)
    return Subject(recipes, target, Path(session.target_path).resolve(), requests, candidates)


def slug(name: str) -> str:
    """Return a name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _recipe_words(
    method: str, recipes: str, work: Path, name: str, words: Sequence[str], own: Sequence[str] = ()
) -> list[str]:
    """Return a head's command line. words: those of every head. own: its own. Its folder is named after its settings, so
    that a changed recipe trains anew beside what an earlier state of the recipes left."""
    data = ("--data_dir", str(_data(recipes, work, words)))
    plain = ["--recipe", f"recipes/{method}/{recipes}.yaml", *SHORT, *own, *data, *words]
    folder = work / "heads" / f"{slug(name)}-{fingerprint(asdict(parse_recipe(plain)))}"
    return [*plain, "--output_dir", str(folder)]


def _data(recipes: str, work: Path, words: Sequence[str]) -> Path:
    """Return the folder of the answers and features of all heads, named after the settings of these."""
    recipe = parse_recipe(["--recipe", f"recipes/eagle3/{recipes}.yaml", *SHORT, *words])
    made_from = {key: value for key, value in asdict(recipe).items() if key in _DATA_KEYS}
    return work / f"data-{fingerprint(made_from)}"


def _session(method: str, recipes: str, work: Path, words: Sequence[str]) -> Session:
    return Session(parse_recipe(_recipe_words(method, recipes, work, method, words)))


def _train_all(
    plans: Sequence[HeadPlan], recipes: str, session: Session, work: Path, words: Sequence[str]
) -> dict[str, Path]:
    """Train heads, as many at once as there are cores, each on one; return their folders by the plans' names.

    Raises UserError with the last line of the log of a training that failed, once all have ended.
    """
    if not plans:
        return {}
    # What all learn from is made before, by this process alone.
    make_stages(session, "extract")
    found, failed = {}, []
    pool = ThreadPoolExecutor(available_cores())
    try:
        running = {pool.submit(_train, plan, recipes, work, words): plan for plan in plans}
        for future in as_completed(running):
            plan, (seconds, log, error) = running[future], future.result()
            found[plan.name] = log.parent / "train" / "best"
            failed += [f"Training {plan.name} failed ({error}): its whole log is {log}."] if error else []
            say(f"{plan.name}: {'failed' if error else 'trained'} in {seconds:.0f} s, {len(found)} of {len(plans)}")
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        raise UserError(failed[0])
    return found


def _train(plan: HeadPlan, recipes: str, work: Path, words: Sequence[str]) -> tuple[float, Path, str]:
    """Train a head in a process of its own; return the seconds, its log, and that one's last line where it failed."""
    more = _recipe_words(plan.method, recipes, work, plan.name, words, plan.words)
    started, log = time.perf_counter(), Path(more[-1]) / "train.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "draftsmith.cli.main", "train", *more]
        # Lines in the order in which they are said: the error is the last.
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=env, check=False)
    last = (log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"])[-1]
    return time.perf_counter() - started, log, last if done.returncode else ""


def _draft_model(session: Session, work: Path) -> Candidate:
    """Train a Llama of two layers and half the target's width on the target's answers, unless `work` holds it."""
    target = session.target
    settings = TrainingSettings(
        vocab_size=target.vocab_size,
        layers=2,
        hidden=target.hidden_size // 2,
        ffn=target.hidden_size,
        # vLLM's attention on a CPU knows no smaller heads.
        heads=target.hidden_size // 2 // 32,
        kv_heads=1,
        context=target.context_length,
        row_tokens=session.recipe.data.max_length,
        rows=8,
        shallow_layers=2,
        shallow_steps=0,
        steps=400,
        muon_lr=0.02,
        adamw_lr=4e-3,
        weight_decay=0.1,
        seed=0,
        eos_id=target.eos_ids[0],
        pad_id=target.eos_ids[0],
    )
    folder = work / f"draft-model-{fingerprint(asdict(settings))}"
    if not folder.exists():
        say(f"\n== {DRAFT_MODEL}")
        samples, partial = make_stages(session, "extract").samples, folder.with_suffix(".partial")
        checkpoint = folder.with_suffix(".checkpoint.pt")
        folder.parent.mkdir(parents=True, exist_ok=True)
        model = train_target(samples, settings, checkpoint, session.device, progress=True, name=DRAFT_MODEL)
        session.tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
        partial.rename(folder)
        checkpoint.unlink(missing_ok=True)
    return Candidate(DRAFT_MODEL, "draft_model", (), model=load_target(str(folder), dtype="float32"), folder=folder)
