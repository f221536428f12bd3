"""The contract of the layout of zankner/Hydra, the code that Hydra was published with.

Its reader makes the heads from the target's configuration and fills them from `hydra_lm_head.pt`, and what the file lacks
or calls otherwise stays random in silence. Symbols in shapes: H target hidden, V target vocab; of the prefix layer I
feed-forward width, ND and GD the widths of queries and of keys and values.
"""

from collections.abc import Iterator

from draftsmith.heads.contracts import Config, Contract, KeyRule, ModelFiles, TensorRule

PREFIX = "prefix_embeding_layer."  # sic
MLP, PREFIX_MLP = "mlp", "prefix-mlp"
ARCHITECTURE = "hydra_head_arch"


def block_place(architecture: str, number: int) -> int:
    """Return where block `number` of a head stands: with a prefix layer a module of dropout stands before each."""
    return 2 * number + 1 if architecture == PREFIX_MLP else number


def projection_name(architecture: str, head: int) -> str:
    """Return what a head's projection is called, without `.weight`."""
    return f"hydra_lm_head.{head}" + (".1" if architecture == PREFIX_MLP else "")


def has_different_blocks(files: ModelFiles) -> bool:
    """Whether a head's blocks after its first are not one and the same, whatever they hold: new ones are equal."""
    return files.sizes["blocks"] > 2


def _tensors(config: Config) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(name, shape) for name, shape in _shapes(config))


def _shapes(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    kind = config[ARCHITECTURE]
    for i in range(config["hydra_num_heads"]):
        for j in range(config["hydra_num_layers"]):
            place = f"hydra_mlp.{i}.{block_place(kind, j)}"
            for part in ("linear", "res_connection") if j == 0 else ("linear",):
                yield f"{place}.{part}.weight", ("H", f"{i + 2}*H" if j == 0 else "H")
                yield f"{place}.{part}.bias", ("H",)
        yield f"{projection_name(kind, i)}.weight", ("V", "H")
        yield f"{projection_name(kind, i)}.bias", ("V",)
    if kind == PREFIX_MLP:
        layer = f"{PREFIX}layers.0."
        for name, shape in {
            "self_attn.q_proj": ("ND", "H"),
            "self_attn.k_proj": ("GD", "H"),
            "self_attn.v_proj": ("GD", "H"),
            "self_attn.o_proj": ("H", "ND"),
            "mlp.gate_proj": ("I", "H"),
            "mlp.up_proj": ("I", "H"),
            "mlp.down_proj": ("H", "I"),
            "input_layernorm": ("H",),
            "post_attention_layernorm": ("H",),
        }.items():
            yield f"{layer}{name}.weight", shape
        yield f"{PREFIX}norm.weight", ("H",)


def _no_sizes(_: Config) -> dict[str, int]:
    return {}


HYDRA = Contract(
    name="hydra",
    tensors=(),
    more_tensors=_tensors,
    keys=(
        KeyRule("hydra_num_heads", int, "the heads; those that the file lacks stay random in silence"),
        KeyRule("hydra_num_layers", int, "the blocks of each head"),
        KeyRule(ARCHITECTURE, str, "the class of the heads, mlp or prefix-mlp; the reader assumes mlp"),
        KeyRule("grounded_heads", bool, "heads that read tokens; the reader assumes those that read none", True),
        KeyRule("hidden_state_offset", int, "heads read the target's last state", 0),
        KeyRule("base_model_name_or_path", str, "the target, which the reader loads from there"),
        KeyRule("original_lm_head", bool, "ours: the projections in the file are copies of the target's"),
    ),
    sizes=_no_sizes,
    ranges={},
)
