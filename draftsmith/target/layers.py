"""The decoder layers of a target: where they are in its modules, on which GPUs, and how several processes share them."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code
from draftsmith.target.config import opener_of


def find_decoder(model: Any) -> nn.Module:
    """Return the model without its output projection, which transformers does not find for every class (Llama 4)."""
    decoder: nn.Module = model.get_decoder()
    return getattr(model, "model", decoder) if decoder is model else decoder


def find_layers(decoder: nn.Module, num_layers: int, model_type: str) -> list[nn.Module]:
    """Return the decoder layers: the first list of `num_layers` modules in `decoder`. UserError where none is."""
    for module in (getattr(decoder, "layers", None), *decoder.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise UserError(
        f"Cannot find the {num_layers} decoder layers of a model of type {model_type!r}: "
        "this architecture cannot be used as a target yet; choose another one."
    )


def spread(path: str, config: Any, first: torch.device, count: int, trust_remote_code: bool) -> dict[str, torch.device]:
    """Return the device of each module of a target whose layers are spread over `count` GPUs from `first` on, as evenly as their
    bytes allow. All but the layers is on the first, where states meet.

    Raises UserError for a device that is no GPU, for GPUs that are not there and for fewer layers than GPUs.
    """
    there, start = torch.cuda.device_count(), first.index or 0
    if first.type != "cuda" or start + count > there:
        here = f"torch sees {there}" if first.type == "cuda" else f"target.device is {first}"
        raise UserError(
            f"target.gpus is {count}, from {first} on, but {here}: name as many GPUs as there are, or leave target.gpus out."
        )
    with foreign_code(f"Cannot open the target {path}", "choose another target"), torch.device("meta"):
        model = opener_of(config).from_config(config, trust_remote_code=trust_remote_code)
    text = model.config.get_text_config(decoder=True)
    layers = find_layers(find_decoder(model), text.num_hidden_layers, text.model_type)
    if len(layers) < count:
        raise UserError(
            f"target.gpus is {count}, but the target {path} has {len(layers)} layers to spread: lower it to {len(layers)} or less."
        )
    names = {module: name for name, module in model.named_modules()}
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in model.parameters())
    before, within = total - sum(sizes), {part for layer in layers for part in layer.modules()}
    places = {
        name: first
        for name, module in model.named_modules()
        if module not in within and (module._parameters or module._buffers)
    }
    for number, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        even = int((before + size / 2) * count / total)
        # At least one for each GPU that is still to come.
        index = min(max(even, count - len(layers) + number), count - 1)
        places[names[layer]] = torch.device("cuda", start + index)
        before += size
    return places


def share(path: str, config: Any, processes: int, device: torch.device, gpus: int) -> Any:
    """Return what tells transformers to split every layer over so many processes, each of which gets a GPU where there are any. Of more
    that were started, each group of so many in a row holds the target.

    Raises UserError where no multiple of them was started, for another device or several GPUs for each, and for a target that
    cannot be split so.
    """
    if gpus > 1:
        raise UserError(f"tensor_parallel is {processes} and gpus {gpus}: choose one, as a process has one GPU.")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device != torch.device(kind):
        raise UserError(
            f"tensor_parallel is {processes} and device {str(device)!r}, but each process takes a "
            f"{'GPU by its LOCAL_RANK' if kind == 'cuda' else 'CPU'}: set device to {kind!r}."
        )
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) % processes:
        raise UserError(
            f"tensor_parallel is {processes}, but {started} process{'es were' if started > 1 else ' was'} started: start "
            f"{processes}, such as with `torchrun --nproc_per_node {processes}`, or a multiple of that."
        )
    text, cannot = config.get_text_config(decoder=True), f"The target {path} cannot be split over {processes} processes"
    if not getattr(text, "base_model_tp_plan", None):
        raise UserError(
            f"{cannot}: transformers has no plan for models of type {text.model_type!r}; spread its layers over GPUs instead (gpus)."
        )
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if odd := next((n for n in (heads, groups) if n % processes), None):
        what = "query heads" if odd == heads else "key/value heads"
        raise UserError(f"{cannot}: its {odd} {what} are no multiple of that; take a divisor of {odd}.")
    from transformers.distributed import DistributedConfig

    class Groups(DistributedConfig):
        """Groups in the mesh of all processes, in each of which the weights are as they are for one: FSDP, which `dp_size` would
        ask for, has no part in them."""

        dp_size = 1

    return Groups(tp_size=processes, dp_replicate_size=started // processes)


def sharers_of(model: Any) -> Any:
    """Return the group of processes that hold a model's layers together, None for one that this process has to itself."""
    meshes = getattr(model, "_mesh_manager", None)
    return None if meshes is None else meshes.get_mesh("tp").get_group()


def gathered(weight: Tensor) -> Tensor:
    """Return a weight, whole where it is shared by several processes, all of which call this."""
    return weight.full_tensor().detach() if hasattr(weight, "full_tensor") else weight
