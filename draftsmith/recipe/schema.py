"""Recipes: what drives every stage, as frozen dataclasses. Their docstrings are the text of `--help`.

Dimensions of the target are never repeated here: they are read from its config.
"""

from dataclasses import dataclass, field, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.fields import BATCH, LATER, LAYER_IDS, TOKENS, Dtype, check_fields, require, within
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.recipe.evaluate import TEMPERATURE, EvaluateSpec, FilterSpec

CHECKPOINTS = 2
"""The newest checkpoints of a training, which are kept: the last may be damaged."""
# A rate of 0 measures what training would start from.
_RATE = within(0, 100)


@dataclass(frozen=True)
class TargetSpec:
    """The frozen target."""

    path: str = "embedded"
    """Folder, Hub name or GGUF file of the target; `embedded` is a tiny Llama that comes with draftsmith, to try it."""
    dtype: Dtype = "auto"
    """Dtype for answers and hidden states; `auto` is that of the checkpoint."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention code of transformers; eager is taken by itself where a model has no other."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""
    gpus: int = field(default=1, metadata=LATER | within(1, 64))
    """GPUs that hold the target's layers together, from `device` on, for a target larger than one GPU; states meet on the first."""
    tensor_parallel: int = field(default=1, metadata=LATER | within(1, 64))
    """Processes, with a GPU each, that split every layer of the target in all stages: all that are started, or groups of so many."""

    def __post_init__(self) -> None:
        check_fields(self, "target.")
        why = "but target.tensor_parallel takes a GPU for each process: leave one of the two out"
        require(min(self.gpus, self.tensor_parallel) == 1, "target.gpus", self.gpus, why)

    @property
    def shared(self) -> bool:
        """Whether several processes hold the target together."""
        return self.tensor_parallel > 1


@dataclass(frozen=True)
class DataSpec:
    """Conversations to learn from."""

    sources: list[str] = field(default_factory=list)
    """JSONL or Parquet files, folders, or Hub data sets; empty takes those that come with the target `embedded`."""
    split: str = "train"
    """Split of Hub data sets."""
    slice: str | None = None
    """Slice name for rows without one; None takes the file's name."""
    limit: int | None = field(default=None, metadata=within(1, 10**9))
    """Conversations to use, the first so many, in turn from every file; None takes all."""
    max_length: int = field(default=2048, metadata=within(4, 2**24))
    """Tokens per sample, prompt and answer together."""
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer samples; both drop and truncate are counted and reported."""
    on_refused: Literal["error", "drop"] = field(default="error", metadata=LATER)
    """What happens to conversations that the chat template does not take or of which it leaves out a call; drop counts and reports them."""
    heldout: int = field(default=200, metadata=within(1, 10**6))
    """Answers kept out of training, for loss and simulated tau."""
    template: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, such as enable_thinking: false."""
    chat_template: str | None = None
    """File with the chat template to take in place of the target's own, or for a base model that has none."""
    date: str | None = field(default=None, metadata=LATER)
    """Day, as 2026-11-29, for templates that print today's date; null: that on which the run began, so that its prompts stay the same."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        if self.date is not None:
            try:
                date.fromisoformat(self.date)
            except ValueError as error:
                raise UserError(f"data.date is {self.date!r}, which is no day: write it as 2026-11-29.") from error


@dataclass(frozen=True)
class AnswersSpec(FilterSpec):
    """Answers by the target."""

    regenerate: bool = True
    """Let the target answer the prompts; false learns from the answers in the data, which is only right
    if the target wrote them."""
    temperature: float = field(default=1.0, metadata=TEMPERATURE)
    """Sampling temperature of the answers."""
    max_new_tokens: int = field(default=512, metadata=within(2, 2**24))
    """Most tokens per answer."""
    batch: int = field(default=64, metadata=BATCH)
    """Prompts answered together, by each server where there are some."""
    servers: list[str] = field(default_factory=list, metadata=LATER)
    """Addresses of running vLLM or llama-server that answer for the target, such as http://localhost:8000; empty answers here."""
    served_name: str | None = field(default=None, metadata=LATER)
    """Name that the servers serve the target by, where it is not the target's own."""

    @property
    def sampling(self) -> Sampling:
        """How the answers were sampled; answers that came with the data are taken to be plain samples."""
        return self.at("answers", self.temperature) if self.regenerate else Sampling(1.0)

    def __post_init__(self) -> None:
        check_fields(self, "answers.")
        self.at("answers", self.temperature)


@dataclass(frozen=True)
class FeaturesSpec:
    """Hidden states of the target."""

    source: Literal["store", "online"] = "store"
    """`store` extracts once to disk; `online` runs the target while training."""
    layer_ids: list[int] | None = field(default=None, metadata=LAYER_IDS)
    """Layers to store; a superset serves other heads later. None stores what the head reads."""
    dtype: Dtype = "auto"
    """Dtype on disk; `auto` is the target's."""
    batch_tokens: int = field(default=8192, metadata=TOKENS)
    """Tokens per forward of the target."""
    shard_mb: int = field(default=512, metadata=within(1, 2**20))
    """Size of a shard file."""
    verify: bool = True
    """Check the checksum of what is read of a sample, the first time."""

    def __post_init__(self) -> None:
        check_fields(self, "features.")


@dataclass(frozen=True)
class TrainSpec:
    """Optimisation."""

    warm_start: str | None = None
    """Folder of a head, or of a run, to start from: a checkpoint, an export or a published head of the same method (Medusa-2
    also takes Medusa's); null starts from scratch. What `head` leaves null is that of that head, the rest must be."""
    resize: bool = field(default=False, metadata=LATER)
    """That head may have another `draft_vocab_size`, `block_size` or `num_heads` than `head` names: what it lacks starts as in a new
    one."""
    lora_rank: int | None = field(default=None, metadata=LATER | within(1, 4096))
    """Rank of an adapter (LoRA) that is trained in place of the weights of that head; null trains the weights."""
    lora_alpha: float | None = field(default=None, metadata=LATER | within(0, 10**6, above=True))
    """The adapter's change of a matrix is scaled by lora_alpha / lora_rank; null is twice the rank."""
    epochs: int = field(default=3, metadata=within(1, 10_000))
    """Passes over the training answers."""
    max_steps: int | None = field(default=None, metadata=within(1, 10**9))
    """Stop after this many optimizer steps."""
    row_tokens: int = field(default=2048, metadata=TOKENS)
    """Length of a packed row."""
    rows: int = field(default=4, metadata=BATCH)
    """Packed rows per micro-batch."""
    accumulation: int = field(default=1, metadata=BATCH)
    """Micro-batches per process and optimizer step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon takes the weight matrices with Muon, and the output projection and the norms with AdamW."""
    lr: float = field(default=1e-4, metadata=_RATE)
    """Peak learning rate of AdamW."""
    muon_lr: float = field(default=0.01, metadata=_RATE)
    """Peak learning rate of Muon."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95], metadata=within(0, 1, below=True))
    """AdamW's betas."""
    weight_decay: float = field(default=0.0, metadata=_RATE)
    """Decoupled weight decay."""
    warmup: float = field(default=0.03, metadata=within(0, 1, "a share of the steps", below=True))
    """Share of the steps spent warming up; then the rate falls along a cosine."""
    final_lr: float = field(default=0.1, metadata=within(0, 1, "a share of the peak"))
    """Learning rate at the end, as a share of the peak."""
    clip: float = field(default=1.0, metadata=within(0, 10**6))
    """Largest gradient norm; 0 does not clip."""
    precision: Literal["bf16", "fp16", "no", "auto"] = "bf16"
    """Autocast dtype; `auto` is bf16 where the device is faster in it, else no. The weights themselves stay in fp32."""
    loss: LossSpec = field(default_factory=LossSpec)
    """The loss."""
    evaluations: int = field(default=10, metadata=within(1, 100_000))
    """How many times the held-out answers are looked at."""
    patience: int | None = field(default=None, metadata=within(1, 100_000))
    """Stop after this many evaluations without a better held-out tau; None never stops early."""
    checkpoint_minutes: float = field(default=5.0, metadata=within(0, 10**6))
    """Minutes between checkpoints to resume from."""
    workers: int = field(default=1, metadata=within(0, 256))
    """Threads that read features while a step computes; 0 reads between steps."""
    compile: bool | None = field(default=None, metadata=LATER)
    """Compile the elementwise parts of a layer with torch.compile; null does so on a GPU, where it takes fewer kernels."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        tokens, most = self.rows * self.row_tokens, TOKENS["range"].most
        why = f"with train.row_tokens {self.row_tokens} that is more than {most} tokens at once"
        require(tokens <= most, "train.rows", self.rows, why)
        two_scalers = self.precision == "fp16" and self.optimizer == "muon"
        require(not two_scalers, "train.precision", "fp16", "Muon and AdamW cannot share a loss scaler: take bf16")
        for key, needed, why in (
            ("lora_rank", self.warm_start, "an adapter changes a head that is trained: name it with train.warm_start"),
            ("lora_alpha", self.lora_rank, "there is no adapter to scale without train.lora_rank"),
        ):
            require(getattr(self, key) is None or needed is not None, f"train.{key}", getattr(self, key), why)
        resizable = self.warm_start is not None and self.lora_rank is None
        why = "it changes the sizes of the head that train.warm_start names, which an adapter (train.lora_rank) leaves"
        require(resizable or not self.resize, "train.resize", True, why)
        muon = self.optimizer == "muon" and self.lora_rank is not None
        why = "the factors of train.lora_rank are no matrices for Muon: take adamw"
        require(not muon, "train.optimizer", "muon", why)
        require(len(self.betas) == 2, "train.betas", self.betas, "AdamW takes two")


@dataclass(frozen=True)
class ExportSpec:
    """The directory that a serving engine loads."""

    layout: str | None = None
    """Layout of the export, which says for which engine; None takes the method's first, for a GGUF target llama.cpp's (docs/export.md)."""
    dtype: Dtype = "auto"
    """Dtype of the exported weights; `auto` is the target's."""
    include_embeddings: bool = False
    """Write embed_tokens too; engines share the target's when it is left out."""
    tensor_parallel: int = field(default=1, metadata=LATER | within(1, 1024))
    """GPUs that an engine will split the draft over; the export refuses what none of the layout's engines could split."""
    engine_version: str | None = field(default=None, metadata=LATER)
    """The engine that will load the export and its version, such as `vllm=0.33.0`; a version that is known not to is warned of."""
    adapter: Literal["merge", "keep"] | None = field(default=None, metadata=LATER)
    """Heads that tune their target (Medusa-2), what is written next to them: merge, which null stands for, a whole model, the
    adapter merged into its weights; keep, the adapter alone, for the original target."""

    def __post_init__(self) -> None:
        check_fields(self, "export.")


Backend = Literal["wandb", "tensorboard", "trackio", "mlflow"]

_TAKEN_BY: dict[str, tuple[Backend, ...]] = {
    "project": ("wandb", "trackio", "mlflow"),
    "entity": ("wandb",),
    "group": ("wandb", "trackio", "mlflow"),
    "tags": ("wandb", "mlflow"),
    "notes": ("wandb", "mlflow"),
    "name": ("wandb", "trackio", "mlflow"),
    "artifacts": ("wandb", "trackio", "mlflow"),
}
"""Which dashboards have a place for what a key of `tracking` says."""


@dataclass(frozen=True)
class TrackingSpec:
    """Dashboards. Each keeps what it is given in the run directory, unless its own environment variables name another place."""

    backends: list[Backend] = field(default_factory=list)
    """Where figures go besides metrics.jsonl: wandb, tensorboard, trackio, mlflow; the last three come with the extra
    `trackers`."""
    wandb: Literal["disabled", "offline", "online"] | None = None
    """offline and online turn Weights & Biases on, disabled turns it off; null is offline where `backends` names it. Offline runs
    can be uploaded later with `wandb sync`."""
    project: str = "draftsmith"
    """Project of W&B and Trackio, experiment of MLflow."""
    entity: str | None = None
    """User or team on W&B; null takes the account's default."""
    group: str | None = None
    """Group of runs on W&B and Trackio; on MLflow it is the tag `group`."""
    tags: list[str] = field(default_factory=list)
    """Tags on W&B and MLflow."""
    notes: str | None = None
    """A description, on W&B and MLflow."""
    name: str | None = None
    """Name of the run on W&B, Trackio and MLflow; null is that of the recipe."""
    artifacts: Literal["none", "results", "all"] = "none"
    """Files to keep on W&B, Trackio or MLflow: results, which are those of the evaluation with its report; all, the exported head
    too. They hold texts of the prompts and answers."""

    def __post_init__(self) -> None:
        check_fields(self, "tracking.")
        require(len(set(self.backends)) == len(self.backends), "tracking.backends", self.backends, "name each once")
        both = self.wandb == "disabled" and "wandb" in self.backends
        require(not both, "tracking.wandb", self.wandb, "but tracking.backends names wandb: leave one of the two out")
        if self.wandb == "disabled" and not self.backends:
            return  # all is turned off, as from the command line for a trial
        for key, takers in _TAKEN_BY.items():
            value = getattr(self, key)
            taken = value in (None, [], getattr(type(self), key, None)) or set(takers) & set(self.active)
            why = f"no dashboard takes it: add {' or '.join(takers)} to tracking.backends, or leave it out"
            require(bool(taken), f"tracking.{key}", value, why)

    @property
    def active(self) -> tuple[Backend, ...]:
        """The dashboards that are on."""
        alone: tuple[Backend, ...] = ("wandb",) if self.wandb in ("offline", "online") else ()
        return tuple(dict.fromkeys((*alone, *self.backends)))


@dataclass(frozen=True)
class Recipe:
    """Everything a run needs, from conversations to an export."""

    name: str = "run"
    """Name of the run."""
    output_dir: str | None = None
    """Run directory; null is runs/<name>."""
    data_dir: str | None = None
    """Folder of answers and hidden states, which several recipes may share; null is the run directory."""
    seed: int = field(default=0, metadata=within(0, 2**32 - 1))
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
        check_fields(self, "")
        if is_dataclass(self.head):
            check_fields(self.head, "head.")  # a method of another package may not do so itself
        name = len(self.name) <= 100 and "/" not in self.name and self.name not in (".", "..")
        require(name, "name", self.name, "it names a folder: at most 100 characters, no /; output_dir takes a path")

    @property
    def run_dir(self) -> Path:
        """Where the run's files go."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def data_path(self) -> Path:
        """Where answers and hidden states go."""
        return Path(self.data_dir) if self.data_dir else self.run_dir
