"""Recipes: what drives every stage, as frozen dataclasses. Their docstrings are the text of `--help`.

Dimensions of the target are never repeated here: they are read from its config.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import UserError
from draftsmith.eval.sampling import Sampling
from draftsmith.eval.verify import Typical
from draftsmith.heads.losses import LossSpec

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise a sentence that names the key, the value and the reason."""
    if not condition:
        raise UserError(f"{key} is {value!r}: {why}.")


@dataclass(frozen=True)
class TargetSpec:
    """The frozen target."""

    path: str = "embedded"
    """Folder or Hub name of the target; `embedded` is a tiny Llama that is trained once and cached."""
    dtype: Dtype = "auto"
    """Dtype for answers and hidden states; `auto` is that of the checkpoint."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""
    attn_implementation: str = "sdpa"
    """Attention code of transformers: sdpa or eager."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""


@dataclass(frozen=True)
class DataSpec:
    """Conversations to learn from."""

    sources: list[str] = field(default_factory=list)
    """JSONL or Parquet files, folders, or Hub data sets; empty takes the embedded default's conversations."""
    split: str = "train"
    """Split of Hub data sets."""
    slice: str | None = None
    """Slice name for rows without one; None takes the file's name."""
    limit: int | None = None
    """Conversations to use, taken evenly over the data; None takes all."""
    max_length: int = 2048
    """Tokens per sample, prompt and answer together."""
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer samples; both drop and truncate are counted and reported."""
    heldout: int = 200
    """Answers kept out of training, for loss and simulated tau."""
    template: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as enable_thinking: false."""

    def __post_init__(self) -> None:
        _require(self.max_length > 3, "data.max_length", self.max_length, "a sample needs at least 4 tokens")
        _require(self.limit is None or self.limit >= 1, "data.limit", self.limit, "it must be at least 1, or null")
        _require(self.heldout >= 1, "data.heldout", self.heldout, "simulated tau needs at least one held-out answer")


@dataclass(frozen=True)
class AnswersSpec:
    """Answers by the target."""

    regenerate: bool = True
    """Let the target answer the prompts; false learns from the answers in the data, which is only right
    if the target wrote them."""
    temperature: float = 1.0
    """Sampling temperature of the answers."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass."""
    max_new_tokens: int = 512
    """Most tokens per answer."""
    batch: int = 64
    """Prompts answered together."""

    @property
    def sampling(self) -> Sampling:
        """How the answers were sampled; answers that came with the data are taken to be plain samples."""
        return Sampling(self.temperature, self.top_k, self.top_p) if self.regenerate else Sampling(1.0)

    def __post_init__(self) -> None:
        _require(self.batch >= 1, "answers.batch", self.batch, "it must be at least 1")
        _require(self.max_new_tokens >= 2, "answers.max_new_tokens", self.max_new_tokens, "a draft needs 2 tokens")


@dataclass(frozen=True)
class FeaturesSpec:
    """Hidden states of the target."""

    source: Literal["store", "online"] = "store"
    """`store` extracts once to disk; `online` runs the target while training."""
    layer_ids: list[int] | None = None
    """Layers to store; a superset serves other heads later. None stores what the head reads."""
    dtype: Dtype = "auto"
    """Dtype on disk; `auto` is the target's."""
    batch_tokens: int = 8192
    """Tokens per forward of the target."""
    shard_mb: int = 512
    """Size of a shard file."""
    verify: bool = True
    """Check every shard's SHA-256 when it is first opened."""

    def __post_init__(self) -> None:
        _require(self.batch_tokens >= 1, "features.batch_tokens", self.batch_tokens, "it must be at least 1")
        _require(self.shard_mb >= 1, "features.shard_mb", self.shard_mb, "it must be at least 1")


@dataclass(frozen=True)
class TrainSpec:
    """Optimisation."""

    epochs: int = 3
    """Passes over the training answers."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    row_tokens: int = 2048
    """Length of a packed row."""
    rows: int = 4
    """Packed rows per micro-batch."""
    accumulation: int = 1
    """Micro-batches per process and optimizer step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon takes the weight matrices with Muon, and the output projection and the norms with AdamW."""
    lr: float = 1e-4
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.01
    """Peak learning rate of Muon."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's betas."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup: float = 0.03
    """Share of the steps spent warming up; then the rate falls along a cosine."""
    final_lr: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    precision: Literal["bf16", "fp16", "no"] = "bf16"
    """Autocast dtype; the weights themselves stay in fp32."""
    loss: LossSpec = field(default_factory=LossSpec)
    """The loss."""
    evaluations: int = 10
    """How many times the held-out answers are looked at."""
    patience: int | None = None
    """Stop after this many evaluations without a better held-out tau; None never stops early."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints to resume from."""
    workers: int = 0
    """Processes that read features."""

    def __post_init__(self) -> None:
        for key in ("epochs", "row_tokens", "rows", "accumulation", "evaluations"):
            _require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "it must be at least 1")
        for key in ("max_steps", "patience"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"train.{key}", value, "it must be at least 1, or null")
        for key in ("lr", "muon_lr", "clip", "weight_decay", "workers", "final_lr"):
            _require(getattr(self, key) >= 0, f"train.{key}", getattr(self, key), "it must not be negative")
        two_scalers = self.precision == "fp16" and self.optimizer == "muon"
        _require(not two_scalers, "train.precision", "fp16", "Muon and AdamW cannot share a loss scaler: take bf16")
        _require(len(self.betas) == 2, "train.betas", self.betas, "AdamW takes two")
        _require(0 <= self.warmup < 1, "train.warmup", self.warmup, "it is a share of the steps, from 0 to below 1")


@dataclass(frozen=True)
class DraftSpec:
    """A way to draft with a head, and the rule that accepts."""

    tree: str = "chain"
    """chain; medusa_63, the published tree; or a JSON file with a list of paths such as [[0], [1], [0, 0]]."""
    acceptance: Literal["lossless", "typical"] = "lossless"
    """typical is Medusa's LOSSY rule: the text no longer follows the target's law (above temperature 0)."""
    epsilon: float = 0.09
    """typical: a token more likely than this is always accepted."""
    delta: float = 0.3
    """typical: a token is accepted above delta * exp(-entropy)."""

    @property
    def typical(self) -> Typical | None:
        """The lossy rule, None for lossless acceptance."""
        return Typical(self.epsilon, self.delta) if self.acceptance == "typical" else None

    def __post_init__(self) -> None:
        Typical(self.epsilon, self.delta)


@dataclass(frozen=True)
class EvaluateSpec:
    """Measuring a head."""

    prompts: list[str] = field(default_factory=list)
    """Prompt sets (JSONL with id, slice, messages); empty takes the embedded default's."""
    per_slice: int | None = None
    """Prompts per slice; None takes all."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """One result.json per temperature."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass."""
    num_speculative_tokens: int = 5
    """Length of the drafted chain; a head that reaches less far drafts as far as it can, a tree has its own depth."""
    max_k: int = 8
    """Largest chain length in the sweep."""
    drafts: list[DraftSpec] = field(default_factory=lambda: [DraftSpec()])
    """Ways to draft, each measured in the same run; trees are for heads that draft them (Medusa)."""
    beside: dict[str, str] = field(default_factory=dict)
    """Heads to measure in the same run, by a name of your choice: the folder of a trained head."""
    max_new_tokens: int = 256
    """Most tokens per answer."""
    max_new_tokens_by_slice: dict[str, int] = field(default_factory=dict)
    """Other limits for some slices."""
    batch: int = 1
    """Prompts decoded together."""
    dtype: Dtype = "auto"
    """Dtype for decoding; `auto` is the target's."""
    repeats: int = 3
    """Timed repeats, interleaved between target and drafters."""
    generate: bool = True
    """Time transformers' generate beside our own baseline."""
    lossless: bool = True
    """Decode every prompt greedily in fp32 with and without the head and compare the ids."""
    example_slices: list[str] = field(default_factory=list)
    """Slices that worked examples come from; empty takes all."""

    def __post_init__(self) -> None:
        key, value = "evaluate.num_speculative_tokens", self.num_speculative_tokens
        _require(1 <= value <= self.max_k, key, value, f"it must be from 1 to evaluate.max_k ({self.max_k})")
        _require(self.repeats >= 1, "evaluate.repeats", self.repeats, "it must be at least 1")
        _require(self.batch >= 1, "evaluate.batch", self.batch, "it must be at least 1")
        count = self.per_slice
        _require(count is None or count >= 1, "evaluate.per_slice", count, "it must be at least 1, or null")
        _require(bool(self.temperatures), "evaluate.temperatures", self.temperatures, "name at least one")
        _require(bool(self.drafts), "evaluate.drafts", self.drafts, "name at least one, such as {tree: chain}")
        twice = len({(d.tree, d.acceptance) for d in self.drafts}) < len(self.drafts)
        _require(not twice, "evaluate.drafts", [d.tree for d in self.drafts], "the same way to draft is named twice")


@dataclass(frozen=True)
class ExportSpec:
    """The directory that a serving engine loads."""

    layout: str | None = None
    """Layout of the export, which says for which engine; None takes the method's first: eagle3 or medusa."""
    dtype: Dtype = "auto"
    """Dtype of the exported weights; `auto` is the target's."""
    include_embeddings: bool = False
    """Write embed_tokens too; engines share the target's when it is left out."""


@dataclass(frozen=True)
class TrackingSpec:
    """Weights & Biases."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Where the dashboards go; offline runs can be uploaded later with `wandb sync`."""
    project: str = "draftsmith"
    """Project name."""


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs, from conversations to an export."""

    name: str = "run"
    """Name of the run."""
    output_dir: str | None = None
    """Run directory; None is runs/<name>."""
    data_dir: str | None = None
    """Where answers and hidden states are kept, so that several recipes can share them; None is the run directory."""
    seed: int = 0
    """Seed of sampling, initialisation and shuffling."""
    target: TargetSpec = field(default_factory=TargetSpec)
    """The frozen target."""
    data: DataSpec = field(default_factory=DataSpec)
    """Conversations to learn from."""
    answers: AnswersSpec = field(default_factory=AnswersSpec)
    """Answers by the target."""
    features: FeaturesSpec = field(default_factory=FeaturesSpec)
    """Hidden states of the target."""
    method: str = "eagle3"
    """The drafter; it decides which keys `head` takes."""
    head: Any = None
    """Options of the drafter."""
    train: TrainSpec = field(default_factory=TrainSpec)
    """Optimisation."""
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    """Measuring the head."""
    export: ExportSpec = field(default_factory=ExportSpec)
    """The directory that a serving engine loads."""
    tracking: TrackingSpec = field(default_factory=TrackingSpec)
    """Weights & Biases."""

    @property
    def run_dir(self) -> Path:
        """Where the run's files go."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def data_path(self) -> Path:
        """Where answers and hidden states go."""
        return Path(self.data_dir) if self.data_dir else self.run_dir
