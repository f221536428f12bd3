"""A target tuned by a LoRA adapter (peft), which shares the weights of the frozen original.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021); Cai et al., "Medusa" (2024), section 2.2.2.
Shapes: B batch rows, L tokens, M documents of one pass, n its longest, R real tokens, H target hidden, V target vocab.

The model is a second tree of modules over the same memory, so the original does not change, and a copy costs no memory for
weights. The adapter's own layers are in both trees: in the model, and under `layers`, which a head registers.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from draftsmith.data.batch import Pass, TrainBatch
from draftsmith.errors import UserError
from draftsmith.storage import fingerprint
from draftsmith.target.kernels import without_autocast
from draftsmith.target.layers import find_decoder
from draftsmith.target.target import Target

_LINEAR = (nn.Linear, Conv1D)
_ADAPTER = "default"  # peft's own name for an only adapter


@dataclass(frozen=True)
class AdapterSpec:
    """Settings of an adapter, which changes a matrix by alpha / rank * B A.

    dropout: of the adapter's input, except the output projection's. modules: names of linear layers, None for all but the
    output projection. lm_head: tune the output projection too.
    """

    rank: int
    alpha: float
    dropout: float
    modules: tuple[str, ...] | None = None
    lm_head: bool = False


class TunedTarget:
    """A target with a new adapter, which changes nothing yet.

    model: a PeftModel. layers: the adapter's layers, by the names of the layers that they change.

    Raises UserError for names that no linear layer has, and for an output projection that cannot be tuned.
    """

    def __init__(self, target: Target, spec: AdapterSpec) -> None:
        # Here and below, so that whatever needs no adapter needs no peft.
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        self.target, self.spec = target, spec
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=_names(target, spec),
            exclude_modules=_outside_decoder(target) or None,
        )
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # of peft about transformers
            self.model: Any = get_peft_model(view_of(target.model), config)
        self.decoder = find_decoder(self.model.get_base_model())
        if spec.lm_head:
            # Called apart from `states`, outside of the batch's draws.
            self.model.get_base_model().get_output_embeddings().lora_dropout[_ADAPTER] = nn.Identity()
        self.layers = nn.Module()
        for name, module in self.model.get_base_model().named_modules():
            if isinstance(module, LoraLayer):
                tree = self.layers
                for part in name.removeprefix("model.").split("."):
                    if not hasattr(tree, part):
                        tree.add_module(part, nn.Module())
                    tree = tree.get_submodule(part)
                tree.add_module("lora_A", module.lora_A[_ADAPTER])
                tree.add_module("lora_B", module.lora_B[_ADAPTER])
                tree.add_module("dropout", module.lora_dropout[_ADAPTER])

    def states(self, batch: TrainBatch, passes: Sequence[Pass], seed: int | None) -> Tensor:
        """Return the tuned target's post-final-norm states [B, L, H] of packed documents, see `read_documents`. seed: what dropout
        draws from, the same wherever and whenever the batch is trained on; None for torch's own generator."""
        drawn = seed is not None and any(m.training for m in self.layers.modules() if isinstance(m, nn.Dropout))
        device = batch.ids.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], enabled=drawn):
            if seed is not None and drawn:
                torch.manual_seed(seed)
            return read_documents(self.decoder, batch, passes)

    def logits(self, states: Tensor) -> Tensor:
        """Return fp32 logits [..., V] of the tuned target's states [..., H], by its own projection, scale and softcap."""
        head = self.target.head
        if not self.spec.lm_head:
            return head.logits(states)
        projection = self.model.get_base_model().get_output_embeddings()
        with without_autocast(states):
            change = _change(projection, states.float())
            logits = F.linear(states.to(head.weight.dtype), head.weight, head.bias).float() + change
            logits = logits * head.scale
            return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)

    def merged(self, target: Target) -> Target:
        """Return a target of its own that computes what the tuned one does, the adapter merged into its weights.

        target: the original, in the dtype of the result. What the adapter leaves alone is shared with it. Raises UserError
        for weights that this dtype cannot hold.
        """
        again = TunedTarget(target, self.spec)
        again.layers.load_state_dict({name: x.to(target.device) for name, x in self.layers.state_dict().items()})
        try:
            model = again.model.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise UserError(
                f"The adapter merged into the target {target.path} gives numbers that {target.dtype_name} cannot hold: take "
                "another dtype, or train it again with a lower head.adapter_lr."
            ) from error
        merged = Target(model, path=f"{target.path} (tuned)", fingerprint=self.fingerprint)
        merged.head.scale, merged.head.softcap = target.head.scale, target.head.softcap  # as found when it was loaded
        return merged

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tuned target, from the original's and the adapter's weights."""
        tensors = {name: x.detach().cpu().contiguous() for name, x in self.layers.state_dict().items()}
        held = [(name, list(x.shape), x.float().numpy().tobytes()) for name, x in sorted(tensors.items())]
        return fingerprint([self.target.fingerprint, self.spec.alpha / self.spec.rank, held])


def read_documents(decoder: Any, batch: TrainBatch, passes: Sequence[Pass]) -> Tensor:
    """Return a decoder's post-final-norm states [B, L, H] of packed documents, zeros on padding, with gradient.

    Documents are unpacked into padded rows, since what an architecture's own mask would need to keep them apart
    differs; a token never sees the padding after it.
    """
    ids, states = batch.ids.flatten(), []
    for one in passes:
        output = decoder(input_ids=ids[one.positions_Mn], past_key_values=_unkept(decoder.config), use_cache=False)
        states.append(output.last_hidden_state.flatten(0, 1)[one.places_R])
    states_RH, positions = torch.cat(states), torch.cat([one.positions_R for one in passes])
    flat = states_RH.new_zeros(len(ids), states_RH.shape[-1]).index_copy(0, positions, states_RH)
    return flat.view(*batch.ids.shape, -1)


class _Unkept(DynamicCache):
    """A cache that keeps nothing. With one, transformers does not wait for the device to learn whether rows hold several texts."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return what was given."""
        return key_states, value_states


def _unkept(config: Any) -> _Unkept | None:
    attention = {"full_attention", "sliding_attention"}
    return _Unkept(config=config) if set(getattr(config, "layer_types", None) or ()) <= attention else None


def view_of(model: nn.Module, shared: Iterable[object] = ()) -> Any:
    """Return a copy of the modules of `model` that shares its tensors; attributes set on it do not change `model`. shared: what it holds
    outside its modules that is not copied either."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(b): b for b in model.buffers()}
    memo |= {id(one): one for one in shared}
    return copy.deepcopy(model, memo)


def _names(target: Target, spec: AdapterSpec) -> list[str]:
    """Return the names of the layers to change, as peft and engines match them: by the ends of their full names."""
    model, left_out = target.model, _outside_decoder(target)
    modules = {name: module for name, module in model.named_modules() if name not in left_out}
    projection = model.get_output_embeddings()
    output = next(name for name, module in modules.items() if module is projection)
    linear = {name for name, module in modules.items() if isinstance(module, _LINEAR)}
    inner = sorted({_shortest(name, linear - {output}, modules) for name in linear - {output}})
    inner = [name for name in inner if not _of_experts(name, model)]
    among = f"choose among {', '.join(inner)}"
    chosen = inner if spec.modules is None else list(spec.modules)
    for name in chosen:
        matched = _ending(name, modules)
        named = f"head.target_modules names {name!r}"
        if not linear.intersection(matched):
            raise UserError(f"{named}, but no linear layer of the target {target.path} is called so: {among}.")
        if output in matched:
            raise UserError(f"{named}, the output projection: set head.tune_lm_head instead.")
        if not linear.issuperset(matched):
            raise UserError(f"{named}, but in the target {target.path} not only linear layers are called so: {among}.")
        if _of_experts(name, model):
            raise UserError(
                f"{named}, which peft takes for the fused experts of the target {target.path}, no linear layers: {among}."
            )
    if spec.lm_head:
        if projection.weight is model.get_input_embeddings().weight:
            raise UserError(
                f"head.tune_lm_head is true, but the output projection of the target {target.path} is its input embedding, "
                "which would change with it: leave it out."
            )
        chosen = [*chosen, _shortest(output, {output}, modules)]
    return chosen


def _outside_decoder(target: Target) -> list[str]:
    """Return the full names of linear layers that texts never reach, such as a vision tower's: they would learn nothing."""
    reached = {*target.decoder.modules(), target.model.get_output_embeddings()}
    return [name for name, m in target.model.named_modules() if isinstance(m, _LINEAR) and m not in reached]


def _ending(name: str, modules: Iterable[str]) -> list[str]:
    """Return the full names that peft matches with `name`."""
    return [full for full in modules if full == name or full.endswith(f".{name}")]


def _shortest(full: str, wanted: set[str], modules: Iterable[str]) -> str:
    """Return the shortest ending of a full name that only modules in `wanted` have.

    A list's layers are called 0, 1, ..., as the decoder's are, so the last part alone may match others.
    """
    parts = full.split(".")
    ends = (".".join(parts[i:]) for i in reversed(range(len(parts))))
    return next(end for end in ends if wanted.issuperset(_ending(end, modules)))


def _of_experts(name: str, model: Any) -> bool:
    """Return whether peft matches `name` with weights of experts that transformers fused into one tensor.

    It would then put an adapter there, even where linear layers (of dense or shared experts) have that name too.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of several that were fused into one
        return True
    return name not in config.target_modules


def _change(layer: Any, x: Tensor) -> Tensor:
    """Return what the adapter adds to the output of a layer for input x; zero while it is disabled."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return x.new_zeros(())
    inside = layer.lora_A[_ADAPTER](layer.lora_dropout[_ADAPTER](x.to(layer.lora_A[_ADAPTER].weight.dtype)))
    return (layer.lora_B[_ADAPTER](inside) * layer.scaling[_ADAPTER]).float()
