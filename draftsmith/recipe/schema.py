"""Recipes: what drives every stage, as frozen dataclasses. Their docstrings are the text of `--help`.

Dimensions of the target are never repeated here: they are read from its config.
"""

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from draftsmith.eval.decode.sampling import Sampling
from draftsmith.fields import LATER, Dtype, require
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.recipe.evaluate import EvaluateSpec, FilterSpec


@dataclass(frozen=True)
class TargetSpec:
    """The frozen target."""

    path: str = "embedded"
    """Folder or Hub name of the target; `embedded` is a tiny Llama that is trained once and cached."""
    dtype: Dtype = "auto"
    """Dtype for answers and hidden states; `auto` is that of the checkpoint."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention code of transformers."""
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
    """Conversations to use, the first so many, in turn from every file; None takes all."""
    max_length: int = 2048
    """Tokens per sample, prompt and answer together."""
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer samples; both drop and truncate are counted and reported."""
    heldout: int = 200
    """Answers kept out of training, for loss and simulated tau."""
    template: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as enable_thinking: false."""

    def __post_init__(self) -> None:
        require(self.max_length > 3, "data.max_length", self.max_length, "a sample needs at least 4 tokens")
        require(self.limit is None or self.limit >= 1, "data.limit", self.limit, "it must be at least 1, or null")
        require(self.heldout >= 1, "data.heldout", self.heldout, "simulated tau needs at least one held-out answer")


@dataclass(frozen=True)
class AnswersSpec(FilterSpec):
    """Answers by the target."""

    regenerate: bool = True
    """Let the target answer the prompts; false learns from the answers in the data, which is only right
    if the target wrote them."""
    temperature: float = 1.0
    """Sampling temperature of the answers."""
    max_new_tokens: int = 512
    """Most tokens per answer."""
    batch: int = 64
    """Prompts answered together."""

    @property
    def sampling(self) -> Sampling:
        """How the answers were sampled; answers that came with the data are taken to be plain samples."""
        return self.at("answers", self.temperature) if self.regenerate else Sampling(1.0)

    @property
    def without_effect(self) -> str | None:
        """The first setting of the sampling that is not the default, which answers that came with the data do not follow."""
        keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return next((key for key in keys if getattr(self, key) != getattr(type(self), key)), None)

    def __post_init__(self) -> None:
        require(self.batch >= 1, "answers.batch", self.batch, "it must be at least 1")
        require(self.max_new_tokens >= 2, "answers.max_new_tokens", self.max_new_tokens, "a draft needs 2 tokens")
        self.at("answers", self.temperature)


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
        require(self.batch_tokens >= 1, "features.batch_tokens", self.batch_tokens, "it must be at least 1")
        require(self.shard_mb >= 1, "features.shard_mb", self.shard_mb, "it must be at least 1")


@dataclass(frozen=True)
class TrainSpec:
    """Optimisation."""

    warm_start: str | None = None
    """Folder of a head, or of a run, to start from: a checkpoint, an export or a published head of the same method (Medusa-2
    also takes Medusa's); null starts from scratch. What `head` leaves null is that of that head, the rest must be."""
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
            require(getattr(self, key) >= 1, f"train.{key}", getattr(self, key), "it must be at least 1")
        for key in ("max_steps", "patience"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"train.{key}", value, "it must be at least 1, or null")
        # A rate of 0 measures what training would start from.
        for key in ("lr", "muon_lr", "clip", "weight_decay", "workers", "checkpoint_minutes"):
            value = getattr(self, key)
            require(isfinite(value) and value >= 0, f"train.{key}", value, "it must be a finite number, not negative")
        require(0 <= self.final_lr <= 1, "train.final_lr", self.final_lr, "it is a share of the peak, from 0 to 1")
        two_scalers = self.precision == "fp16" and self.optimizer == "muon"
        require(not two_scalers, "train.precision", "fp16", "Muon and AdamW cannot share a loss scaler: take bf16")
        two = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(two, "train.betas", self.betas, "AdamW takes two, each from 0 to below 1")
        require(0 <= self.warmup < 1, "train.warmup", self.warmup, "it is a share of the steps, from 0 to below 1")


@dataclass(frozen=True)
class ExportSpec:
    """The directory that a serving engine loads."""

    layout: str | None = None
    """Layout of the export, which says for which engine; None takes the method's first (docs/export.md)."""
    dtype: Dtype = "auto"
    """Dtype of the exported weights; `auto` is the target's."""
    include_embeddings: bool = False
    """Write embed_tokens too; engines share the target's when it is left out."""
    tensor_parallel: int = field(default=1, metadata=LATER)
    """GPUs that an engine will split the draft over; the export refuses what none of the layout's engines could split."""
    adapter: Literal["merge", "keep"] | None = field(default=None, metadata=LATER)
    """Heads that tune their target (Medusa-2), what is written next to them: merge, which null stands for, a whole model, the
    adapter merged into its weights; keep, the adapter alone, for the original target."""

    def __post_init__(self) -> None:
        require(self.tensor_parallel >= 1, "export.tensor_parallel", self.tensor_parallel, "it must be at least 1")


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
    """Run directory; null is runs/<name>."""
    data_dir: str | None = None
    """Folder of answers and hidden states, which several recipes may share; null is the run directory."""
    seed: int = 0
    """Seed of sampling, initialisation and shuffling."""
    target: TargetSpec = field(default_factory=TargetSpec)
    data: DataSpec = field(default_factory=DataSpec)
    answers: AnswersSpec = field(default_factory=AnswersSpec)
    features: FeaturesSpec = field(default_factory=FeaturesSpec)
    method: str = "eagle3"
    """The drafter; it decides which keys `head` takes."""
    head: Any = None
    """Options of the drafter."""
    train: TrainSpec = field(default_factory=TrainSpec)
    evaluate: EvaluateSpec = field(default_factory=EvaluateSpec)
    export: ExportSpec = field(default_factory=ExportSpec)
    tracking: TrackingSpec = field(default_factory=TrackingSpec)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "seed", self.seed, "it must be from 0 to 4294967295")
        forks = self.features.source == "online" and self.train.workers > 0
        reason = "the target cannot be forked for features.source: online: set it to 0"
        require(not forks, "train.workers", self.train.workers, reason)

    @property
    def run_dir(self) -> Path:
        """Where the run's files go."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def data_path(self) -> Path:
        """Where answers and hidden states go."""
        return Path(self.data_dir) if self.data_dir else self.run_dir
