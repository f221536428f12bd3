"""A small stand-alone language model as the drafter, distilled from the target's answers.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), draft with one; Zhou et al.,
"DistillSpec" (2024), train it on the target's own answers and distributions.

It starts from sizes alone, from another model, or from layers of the target.

Shapes: R_k rows of step k (flat b*L+t), H hidden, V target vocab.

It reads tokens and nothing of the target. Row t at step k predicts x_{t+2+k} from x_0..x_{t+1+k}: all steps are one and the
same pass over the text, read at shifted rows, and so training needs the first step alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.batch import TrainBatch, plan_documents
from draftsmith.data.conversations.templates import read_tokenizer
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead, HeadOutput, Reads, StepOutput
from draftsmith.heads.draft_model import SIZES, DraftLmOptions
from draftsmith.heads.formats.recognise import is_head_config
from draftsmith.heads.layers.decoder_layer import Rotary
from draftsmith.heads.layers.from_target import LAYER_KEYS, LONGEST_CONTEXT, check_heads, rope_parameters
from draftsmith.heads.plan import Plan
from draftsmith.target.folder import hash_tokenizer
from draftsmith.target.pretrained import load_config, open_model
from draftsmith.target.target import Target, context_of
from draftsmith.target.tokens import check_same_tokens
from draftsmith.target.tuned import read_documents

USUAL_LAYERS = 2
PROJECTION, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
KEYS = tuple(dict.fromkeys((*LAYER_KEYS, "num_hidden_layers", "tie_word_embeddings")))
"""What a draft model's configuration is made of; the rest of a LlamaConfig is at its defaults."""

Start = tuple[LlamaConfig, dict[str, Tensor] | None]
"""The configuration, and the tensors to start with by their names in transformers; None for new ones."""


def starting_point(options: DraftLmOptions, target: Target) -> Start:
    """Return what a new draft model for `target` is made of. Raises UserError where that cannot be."""
    if options.init_from is None and options.layers_from_target is None:
        return _new_config(options, target), None
    key = "init_from" if options.layers_from_target is None else "layers_from_target"
    if named := next((name for name in SIZES if getattr(options, name) is not None), None):
        raise UserError(
            f"head.{named} is {getattr(options, named)}, but head.{key} names what has sizes of its own: leave head.{named} out."
        )
    if options.init_from is not None:
        return _from_model(options.init_from, target)
    assert options.layers_from_target is not None
    # Copies of some of the target's layers, in fp32, renumbered, between its ends.
    if not 0 <= options.layers_from_target[0] <= options.layers_from_target[-1] < target.num_layers:
        raise UserError(
            f"head.layers_from_target is {options.layers_from_target}, but the target {target.path} has {target.num_layers} layers: choose from "
            f"0 to {target.num_layers - 1}."
        )
    what = f"head.layers_from_target: the target {target.path}"
    config = read_llama(target.config, what, "start from scratch, or name a small model in head.init_from")
    if getattr(target.config, "quantization_config", None) is not None:
        raise UserError(
            f"{what} is quantized, and its layers are not: name the unquantized model, or a small one, in head.init_from."
        )
    config.num_hidden_layers = len(options.layers_from_target)
    new_number = {str(layer): str(number) for number, layer in enumerate(options.layers_from_target)}
    tensors = {}
    for name, value in target.model.state_dict().items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if parts[2] not in new_number:
                continue
            parts[2] = new_number[parts[2]]
        tensors[".".join(parts)] = value.detach().float().clone()
    return config, drop_tied(config, tensors)


def read_llama(config: Any, name: str, remedy: str) -> LlamaConfig:
    """Return the configuration of a draft model like that of a transformers Llama. Raises UserError, which ends in
    `remedy`, where its layers are others than engines build for a plain Llama."""
    odd = None
    if config.model_type != "llama":
        odd = f"is of type {config.model_type!r}"
    elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        odd = "has biases in its layers"
    elif config.hidden_act != "silu":
        odd = f"has the activation {config.hidden_act!r}"
    if odd is not None:
        raise UserError(f"{name} {odd}, but draft models here are plain Llamas without biases, with SiLU: {remedy}.")
    return LlamaConfig(**{key: getattr(config, key) for key in KEYS})


def check_vocabulary(name: str, vocab_size: int, target: Target) -> None:
    """Raise UserError unless a model has as many rows of tokens as the target."""
    if vocab_size != target.vocab_size:
        raise UserError(
            f"{name} has a vocabulary of {vocab_size} tokens, but the target {target.path} has {target.vocab_size}: "
            "take a model of the target's own family."
        )


def check_tokens(path: str, folder: Path, target: Target) -> None:
    """Raise UserError where the tokenizer of the model `path`, whose files are in `folder`, differs from the target's.

    Where either has none there is nothing to compare.
    """
    if target.directory is None:
        return
    ours, theirs = hash_tokenizer(target.directory), hash_tokenizer(folder)
    if ours is not None and theirs is not None and ours != theirs:
        check_same_tokens(read_tokenizer(target.path), read_tokenizer(path), path)


def drop_tied(config: LlamaConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without an output projection that is the embeddings."""
    return {name: value for name, value in tensors.items() if name != PROJECTION or not config.tie_word_embeddings}


def _new_config(options: DraftLmOptions, target: Target) -> LlamaConfig:
    config = target.config
    H = options.hidden_size or target.hidden_size
    D = options.head_dim or getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads
    heads = options.num_attention_heads or max(1, H // D)
    groups = options.num_key_value_heads or gcd(heads, getattr(config, "num_key_value_heads", None) or heads)
    width, theirs = options.intermediate_size, getattr(config, "intermediate_size", None)
    if width is None and not isinstance(theirs, int):
        raise UserError(f"The target {target.path} names no intermediate_size: set head.intermediate_size.")
    check_heads(heads, groups, D, H)
    tied = getattr(target.model.config, "tie_word_embeddings", False)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=H,
        intermediate_size=width or max(1, (theirs or 0) * H // target.hidden_size),
        num_hidden_layers=options.num_hidden_layers or USUAL_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=D,
        hidden_act="silu",
        max_position_embeddings=min(target.context_length, LONGEST_CONTEXT),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=bool(tied if options.tie_word_embeddings is None else options.tie_word_embeddings),
    )


def _from_model(path: str, target: Target) -> Start:
    """The weights of another model in a folder or on the Hub, in fp32; for a target without values the sizes alone."""
    if is_head_config(Path(path) / "config.json"):
        raise UserError(
            f"head.init_from names {path}, which holds a draft head: give the folder of a whole model, or go on from this draft "
            "with train.warm_start."
        )
    try:
        what, remedy = f"The model {path}", "take another one, or start from scratch"
        if target.device.type == "meta":
            return read_llama(load_config(path, what="the model"), what, remedy), None
        model, directory, _ = open_model(
            path, dtype="float32", device=target.device, attn_implementation="sdpa", trust_remote_code=False
        )
        if target.directory is not None and directory.resolve() == target.directory.resolve():
            raise UserError(
                f"{path} is the target itself; take a smaller model, or some of its layers (head.layers_from_target)."
            )
        config = read_llama(model.config, what, remedy)
        check_vocabulary(what, config.vocab_size, target)
        if target.directory is not None and hash_tokenizer(directory) is None:
            read_tokenizer(path)  # says what is missing, and fetches a Hub model's
        check_tokens(path, directory, target)
    except UserError as error:
        raise UserError(f"head.init_from names a model that cannot be a draft for the target: {error}") from error
    return config, drop_tied(config, model.state_dict())


class DraftLmHead(DraftHead):
    """A Llama. Parameters carry the names of transformers' LlamaForCausalLM; one with tied ends has no `lm_head`.

    Weights start in fp32 as transformers makes them, all of them trained.
    """

    method: ClassVar[str] = "draft_model"
    options_class = DraftLmOptions
    layer_keys = KEYS

    def __init__(self, options: DraftLmOptions, config: LlamaConfig, *_: object) -> None:
        super().__init__()
        self.options, self.config = options, config
        self.reads = Reads(target_states=False, context_length=context_of(config))
        made = LlamaForCausalLM(config)
        self.model = made.model
        self.model.rotary_emb = Rotary(config)
        self.lm_head: nn.Linear | None = None if config.tie_word_embeddings else made.lm_head

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`: the positions of later steps are among those of the first, whose logits serve all."""
        plan = super().plan(batch, num_steps)
        among = tuple(torch.searchsorted(plan.rows[0], rows + k) for k, rows in enumerate(plan.rows))
        return replace(plan, among=among, passes=plan_documents(batch.document, batch.ids.numel()))

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return the logits [R_k, V] of `num_steps` steps, from one pass over the documents."""
        plan = self.planned(batch, num_steps)
        states_RH = read_documents(self.model, batch, plan.passes).flatten(0, 1)[plan.rows[0] + 1]
        if num_steps == 1:
            return HeadOutput((StepOutput(0, plan.rows[0], states_RH, self.logits),))
        logits_RV = self.logits(states_RH)
        steps = enumerate(zip(plan.rows, plan.among, strict=True))
        return HeadOutput(tuple(StepOutput(k, rows, logits_RV[at]) for k, (rows, at) in steps))

    def logits(self, states: Tensor) -> Tensor:
        """States behind the final norm [..., H] -> draft logits [..., V]."""
        return F.linear(states, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)


class DraftLmDrafter(DraftModel):
    """Drafts chains of `num_speculative_tokens` tokens, sampled under the target's sampling settings.

    greedy_drafts: draft the argmax at every temperature (as vLLM drafts). rule: drafts end where it says.
    """

    def __init__(
        self,
        head: DraftLmHead,
        num_speculative_tokens: int,
        *,
        greedy_drafts: bool = False,
        rule: LengthRule | None = None,
    ) -> None:
        model, vocab_size = as_model(head.eval()), head.config.vocab_size
        super().__init__(model, num_speculative_tokens, vocab_size, greedy_drafts=greedy_drafts, rule=rule)


def as_model(head: DraftLmHead) -> Target:
    """Return the head as a language model with a cache. It shares the head's memory, and freezes nothing of it."""
    with torch.device("meta"):
        model = LlamaForCausalLM(head.config)
    model.load_state_dict(head.state_dict(), strict=False, assign=True)
    if head.lm_head is None:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = head.model.rotary_emb
    return Target(model, path="of the method draft_model", fingerprint="")


def build(options: DraftLmOptions, target: Target, draft_vocab: Tensor | None) -> DraftLmHead:
    """Return an fp32 draft model for `target`, new or with the weights of what `options` start from.

    Raises UserError for sizes that do not fit together and for what cannot be started from.
    """
    assert draft_vocab is None, "a draft model predicts the whole vocabulary"
    config, tensors = starting_point(options, target)
    with torch.device(target.device):
        head = DraftLmHead(options, config)
    if tensors is not None:
        head.load_state_dict(tensors)
    return head


load = DraftLmHead.load
