"""Train the heads that the engine check serves, and prepare their target and its prompts."""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.data.embedded import SHIPPED, ensure_embedded
from draftsmith.data.features.index import SCHEMA_VERSION
from draftsmith.decoder.answers import Request
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.recognise import load_head
from draftsmith.machine import available_cores
from draftsmith.progress import say
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.evaluation import prompts_of
from draftsmith.stages.gguf import LAYOUT as LLAMA_CPP_LAYOUT
from draftsmith.stages.pipeline import make_stages
from draftsmith.stages.session import Session
from draftsmith.storage import fingerprint, write_json
from draftsmith.target.folder import read_object
from draftsmith.target.gguf_file import is_gguf, model_folder, open_gguf
from draftsmith.target.target import Target
from scripts.bench.commands import run_command

SHORT = (
    *("--data.limit", "800", "--data.heldout", "20", "--train.epochs", "6"),
    *("--train.max_steps", "120", "--train.evaluations", "1"),
)
"""Short training: enough for drafts to be accepted, which is all that a comparison needs."""


@dataclass(frozen=True)
class HeadPlan:
    """A head to train and serve: its name, method, the layouts it is served from, the keys of its recipe's `head` section
    (or whole words of the command line), and the steps of its training where a shorter one does. native: it stands in the files of its
    target, which is then that of `save_glm4_moe`."""

    name: str
    method: str
    layouts: tuple[str, ...]
    head: str = ""
    steps: int | None = None
    native: bool = False

    @property
    def words(self) -> list[str]:
        """The words of the command line that are its own."""
        words = [word if word.startswith("--") else f"--head.{word}" for word in self.head.split()]
        return words + ([] if self.steps is None else [f"--train.max_steps={self.steps}"])


_DATA_KEYS = ("seed", "target", "data", "answers", "features")
_BOTH = ("eagle3", "eagle3_speculators")
_ALL = (*_BOTH, LLAMA_CPP_LAYOUT)
_ATTENTION = "num_attention_heads=2 num_key_value_heads=1"
PLANS = (
    HeadPlan("eagle3", "eagle3", _ALL),
    HeadPlan(
        "eagle3 norm_before_residual, W=512", "eagle3", _ALL, "norm_before_residual=true draft_vocab_size=512", 60
    ),
    HeadPlan("eagle3 norm_before_fc", "eagle3", _ALL, "norm_before_fc=true", 60),
    HeadPlan("eagle3 fc_norm", "eagle3", _BOTH, "fc_norm=true", 60),
    HeadPlan("eagle3 norm_output", "eagle3", _BOTH, "norm_output=true", 60),
    HeadPlan("eagle3 fc_norm, norm_output", "eagle3", ("eagle3",), "fc_norm=true norm_output=true", 60),
    HeadPlan("eagle3 of 2 layers, sliding window of 32", "eagle3", _BOTH, "num_hidden_layers=2 sliding_window=32", 60),
    HeadPlan("eagle3 of width 64", "eagle3", _ALL, f"hidden_size=64 train_embeddings=true {_ATTENTION}"),
    HeadPlan("peagle", "peagle", ("peagle", "peagle_speculators")),
    HeadPlan("eagle1", "eagle1", ("eagle1",)),
    # A block of K + 1 slots, since engines fill in no more of it than they draft.
    HeadPlan("dflash", "dflash", ("dflash_llama_cpp",), "block_size=6"),
    # On CPUs vLLM 0.32 takes the first layer's norm of keys for the context of all layers, so one layer is what agrees.
    HeadPlan("dflash of one layer", "dflash", ("dflash",), "block_size=6 num_layers=1 draft_vocab_size=512", 60),
    HeadPlan("dflash2", "dflash2", ("dflash2_llama_cpp",)),
    HeadPlan("dspark", "dspark", ("dspark_llama_cpp",), "block_size=5"),
    HeadPlan("draft model, trained", "draft_model", ("draft_model",)),
    HeadPlan("medusa", "medusa", ("medusa_vllm",)),
    HeadPlan(
        "medusa on the target's projection, 2 blocks",
        "medusa",
        ("medusa_vllm",),
        "original_lm_head=true num_layers=2 --export.layout=medusa_vllm",
        60,
    ),
    # vLLM feeds the layer other states than transformers does.
    HeadPlan("mtp", "mtp", ("mtp",), "target_state=vllm layer=target", 60, native=True),
)


@dataclass(frozen=True)
class Candidate:
    """A trained head, and the layouts that it is exported to."""

    name: str
    layouts: tuple[str, ...]
    head: DraftHead


@dataclass(frozen=True)
class ServedTarget:
    """A target in float32, its folder and, where it came in one, its GGUF file, the prompts, and the heads that draft for it."""

    name: str
    target: Target
    folder: Path
    requests: list[Request]
    candidates: list[Candidate]
    gguf: Path | None = None


def save_glm4_moe(folder: Path) -> Path:
    """Save the embedded target as one of a class whose MTP layers engines serve. Its logits stay what they are: the last layer's
    feed-forward part becomes two equal experts, beside a shared one of zeros."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    config, tensors = read_object(folder / "config.json"), load_file(folder / "model.safetensors")
    last, width = config["num_hidden_layers"] - 1, config["intermediate_size"]
    config |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_nextn_predict_layers": 1}
    config |= {
        "use_qk_norm": False,
        "first_k_dense_replace": last,
        "moe_intermediate_size": width,
        "n_shared_experts": 1,
    }
    config |= {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    # vLLM knows no tied embeddings of the class.
    config |= {
        "tie_word_embeddings": False,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 1.0},
    }
    write_json(folder / "config.json", config)
    part, embeddings = f"model.layers.{last}.mlp.", tensors["model.embed_tokens.weight"]
    for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
        weight = tensors.pop(part + name)
        tensors |= {f"{part}experts.{expert}.{name}": weight.clone() for expert in range(2)}
        tensors[f"{part}shared_experts.{name}"] = torch.zeros_like(weight)
    tensors[f"{part}gate.weight"] = embeddings.new_zeros(2, config["hidden_size"])
    tensors[f"{part}gate.e_score_correction_bias"] = torch.zeros(2)
    save_file(tensors | {"lm_head.weight": embeddings.clone()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def prepare_targets(
    recipes: str, work: Path, heads: Mapping[str, Path], only: Sequence[str], words: Sequence[str]
) -> Iterator[ServedTarget]:
    """Yield the target of `recipes/*/<recipes>.yaml` and, of the tiny ones, that with an MTP layer, each with its heads and prompts.

    work: where answers, features and heads are kept between runs. heads: finished ones, by the name of their plan. only:
    names to take, all if empty. words: further words for every recipe, the last of equal ones counts.
    """
    plans = [plan for plan in PLANS if not only or plan.name in only]
    if usual := [plan for plan in plans if not plan.native]:
        yield _prepare(recipes, recipes, work, heads, usual, words)
    if recipes == "tiny" and (native := [plan for plan in plans if plan.native]):
        texts, folder = ensure_embedded(), str(save_glm4_moe(work / "glm4-moe"))
        named = {"data.sources": texts.conversations, "evaluate.prompts": texts.prompts}
        lists = [word for key, path in named.items() for word in (f"--{key}", json.dumps([str(path)]))]
        yield _prepare("glm4-moe", recipes, work, heads, native, [*words, "--target.path", folder, *lists])


def _prepare(
    name: str, recipes: str, work: Path, heads: Mapping[str, Path], plans: Sequence[HeadPlan], words: Sequence[str]
) -> ServedTarget:
    """Train the heads of the plans briefly; return them with their target, of that name, and its prompts."""
    session = Session(parse_recipe(_recipe_words("eagle3", recipes, work, "eagle3", words)))
    target = session.load_target("float32")
    missing = [plan for plan in plans if plan.name not in heads]
    folders = dict(heads) | _train_all(missing, recipes, session, work, words)
    candidates = [Candidate(p.name, p.layouts, load_head(folders[p.name], target).eval()) for p in plans]
    requests = list(prompts_of(session, target).requests)
    path = session.target_path
    gguf = open_gguf(path).file.resolve() if is_gguf(path) else None
    return ServedTarget(name, target, model_folder(path).resolve(), requests, candidates, gguf)


def slug(name: str) -> str:
    """Return a name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _recipe_words(
    method: str, recipes: str, work: Path, name: str, words: Sequence[str], own: Sequence[str] = ()
) -> list[str]:
    """Return a head's command line. words: those of every head. own: its own.

    Folders are named after the settings that decide their content, so that a changed recipe trains anew.
    """
    shared = parse_recipe(["--recipe", f"recipes/eagle3/{recipes}.yaml", *SHORT, *words])
    made_of = {key: asdict(shared)[key] for key in _DATA_KEYS} | {"store": SCHEMA_VERSION}
    data = work / f"data-{fingerprint(made_of)}"
    plain = ["--recipe", f"recipes/{method}/{recipes}.yaml", *SHORT, *own, "--data_dir", str(data), *words]
    folder = work / "heads" / f"{slug(name)}-{fingerprint(asdict(parse_recipe(plain)))}"
    return [*plain, "--output_dir", str(folder)]


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
            found[plan.name] = log.with_suffix("") / "train" / "best"
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
    # Beside the run's own folder, which nothing but the run may have begun.
    started, log = time.perf_counter(), Path(more[-1] + ".log")
    last = run_command("train", more, log)
    return time.perf_counter() - started, log, last
