"""A checkpoint that holds more or other numbers than its model takes is refused by name; whole modules beside the decoder are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.target.target import load_target
from tests.models import save_tiny_target
from tests.pretended_gpu.cuda import pretended_gpu

Tensors = dict[str, Tensor]
FINE_GRAINED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
NOT_READ = "which transformers does not read: give the model that it was made from"
QUANTIZED = "of quantized weights, which would be taken for others without it: give the model that it was made from"
ANOTHER = "without it this is another model"


def spoiled(folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> str:
    """A tiny Llama, its projections changed, and keys of its config.json."""
    path, file = save_tiny_target(folder, "llama", num_hidden_layers=4), folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return path


def each(change: Callable[[str, Tensor], Tensors]) -> Callable[[Tensors], Tensors]:
    """Replace each projection [n, k], by its name without `.weight`, by other tensors."""

    def changed(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, value in tensors.items():
            found |= change(name.removesuffix(".weight"), value) if "_proj" in name else {name: value}
        return found

    return changed


def also(**added: Tensor) -> Callable[[Tensors], Tensors]:
    """Add tensors; `__` stands for a dot."""
    return lambda tensors: tensors | {name.replace("__", "."): value for name, value in added.items()}


def _float8(value: Tensor) -> Tensor:
    return (value / _scale(value)).to(torch.float8_e4m3fn)


def _scale(value: Tensor) -> Tensor:
    return value.abs().max() / 448


def modelopt(name: str, value: Tensor) -> Tensors:
    return {
        f"{name}.weight": _float8(value),
        f"{name}.weight_scale": _scale(value),
        f"{name}.input_scale": torch.ones(()),
    }


def fine_grained(name: str, value: Tensor) -> Tensors:
    return {f"{name}.weight": _float8(value), f"{name}.weight_scale_inv": _scale(value).view(1, 1)}


def gptq(name: str, value: Tensor) -> Tensors:
    rows, columns = value.shape
    packed = {"qweight": torch.ones(columns // 8, rows).int(), "qzeros": torch.ones(1, rows // 8).int()}
    return {f"{name}.{key}": x for key, x in (packed | {"scales": torch.ones(1, rows)}).items()}


def mlx(name: str, value: Tensor) -> Tensors:
    rows, columns = value.shape
    packed = {
        "weight": torch.ones(rows, columns // 8).int(),
        "scales": torch.ones(rows, 1),
        "biases": torch.ones(rows, 1),
    }
    return {f"{name}.{key}": x for key, x in packed.items()}


def bitsandbytes(name: str, value: Tensor) -> Tensors:
    packed = torch.ones(value.numel() // 2, 1).byte()
    return {f"{name}.weight": packed, f"{name}.weight.absmax": torch.ones(4)}


def cast(dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    return each(lambda name, value: {f"{name}.weight": value.to(dtype)})


def plain(tensors: Tensors) -> Tensors:
    return tensors


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], Any, str]] = {
    "modelopt without a name": (each(modelopt), None, r"down_proj.weight as F8_E4M3.*names no quantization_config"),
    "modelopt": (each(modelopt), {"quant_method": "modelopt", "quant_algo": "FP8"}, f"'modelopt', {NOT_READ}"),
    "a number": (plain, {"quant_method": 7}, f"the format 7, {NOT_READ}"),
    "mlx": (each(mlx), {"group_size": 64, "bits": 4}, f"without a name .no quant_method., {NOT_READ}"),
    "mlx without a name": (each(mlx), None, "down_proj.weight as I32, numbers of a quantized weight"),
    "gptq without a name": (each(gptq), None, f"down_proj.qweight and .* {QUANTIZED}"),
    "bitsandbytes without a name": (each(bitsandbytes), None, "down_proj.weight as U8, numbers of a quantized weight"),
    "int64": (also(model__norm__weight=torch.ones(64).long()), None, "model.norm.weight as I64"),
    "fine-grained float8 without scales": (
        cast(torch.float8_e4m3fn),
        FINE_GRAINED,
        "no scale for the quantized weight",
    ),
    "a scale of another format": (
        lambda tensors: each(fine_grained)(tensors) | {"model.layers.0.self_attn.k_scale": torch.ones(())},
        FINE_GRAINED,
        f"self_attn.k_scale, .* {QUANTIZED}",
    ),
    **{
        f"{name} beside floats": (
            also(**{f"model__layers__0__mlp__up_proj__{name}": torch.ones(())}),
            None,
            f"up_proj.{name}, .* {QUANTIZED}",
        )
        for name in [
            "scales",
            "qscale_weight",
            "weight_scale_2",
            "weight_zero_point",
            "zero_points",
            "zeros",
            "amax",
            "weight_scb",
        ]
    },
    "scales of something else than a cache": (
        also(model__layers__0__mlp__up_proj__k_scale=torch.ones(())),
        None,
        f"up_proj.k_scale, .* {QUANTIZED}",
    ),
    "a bias": (also(model__layers__1__self_attn__q_proj__bias=torch.ones(64)), None, f"q_proj.bias, .* {ANOTHER}"),
    "a bias of the projection": (also(lm_head__bias=torch.ones(160)), None, f"lm_head.bias, .* {ANOTHER}"),
    "a norm": (also(model__layers__0__mlp__norm__weight=torch.ones(64)), None, f"mlp.norm.weight, .* {ANOTHER}"),
    "a layer": (also(model__layers__4__mlp__up_proj__weight=torch.ones(96, 64)), None, f"layers.4.mlp.* {ANOTHER}"),
    **{
        f"{method}: what it needs": (plain, {"quant_method": method, **keys}, f"{needs}.*it is quantized .{method}")
        for method, keys, needs in (
            ("gptq", {"bits": 4}, "optimum"),
            ("bitsandbytes", {"load_in_4bit": True}, "bitsandbytes"),
        )
    },
}
"""What is wrong -> how the tensors are changed, quantization_config, and the sentence."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_does_not_take_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, quantization, sentence = REFUSED[case]
    path = spoiled(tmp_path, change, **({} if quantization is None else {"quantization_config": quantization}))
    with pytest.raises(UserError, match=sentence) as info:
        load_target(path)
    text = str(info.value)
    assert "\n" not in text
    assert (ANOTHER in text) or "fetch" not in text


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            also(mtp__fc__weight=torch.ones(3), mtp__layers__9__a__weight=torch.ones(3)),
            ("MTP layers: mtp.fc.weight and 1",),
        ),
        (
            also(model__layers__4__eh_proj__weight=torch.ones(3), model__layers__4__mlp__up_proj__weight=torch.ones(3)),
            ("MTP layers: model.layers.4.eh_proj.weight and 1 more",),
        ),
        (
            also(model__visual__blocks__0__weight=torch.ones(3)),
            ("other inputs than text: model.visual.blocks.0.weight",),
        ),
        (
            also(audio_tower__layers__0__q_proj__bias=torch.ones(3), mtp__a=torch.ones(1)),
            ("other inputs than text: audio_tower", "MTP layers: mtp.a"),
        ),
        *(
            (
                also(
                    **{f"model__layers__0__self_attn__{one}": torch.ones(()) for one in (name, name.replace("k", "v"))}
                ),
                (f"scales of an 8-bit cache: model.layers.0.self_attn.{name.replace('__', '.')} and 1 more",),
            )
            for name in ("k_scale", "attn__k_scale", "k_proj__k_scale", "k_proj__output_scale", "k_zero_point")
        ),
    ],
)
def test_modules_beside_the_decoder_are_named(
    tensors: Callable[[Tensors], Tensors], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spoiled(tmp_path, tensors)
    load_target(path)
    load_target(path)
    said = capsys.readouterr().err
    assert said.count(f"warning: the target {path} is used without what its files hold beside the decoder") == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize(("apart", "refused"), [(0.0, False), (1.0, True)])
def test_a_projection_of_its_own_beside_a_tied_configuration_is_refused(
    apart: float, refused: bool, tmp_path: Path
) -> None:
    """transformers computes with it, serving engines with the embeddings."""

    def with_projection(tensors: Tensors) -> Tensors:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + apart}

    path = spoiled(tmp_path, with_projection, tie_word_embeddings=True)
    if refused:
        with pytest.raises(UserError, match=r"its own lm_head\.weight, but .* ties that to the embeddings"):
            load_target(path)
    else:
        target = load_target(path)
        assert target.head.weight.data_ptr() == target.embedding.data_ptr()
        assert target.identity.tied


def test_embeddings_that_are_stored_as_the_projection_are_the_identitys(tmp_path: Path) -> None:
    path = spoiled(
        tmp_path, lambda t: {k: v for k, v in t.items() if k != "model.embed_tokens.weight"}, tie_word_embeddings=True
    )
    first = load_target(path).identity
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": load_file(file)["lm_head.weight"] + 1}, file, {"format": "pt"})
    assert None is not first.lm_head != load_target(path).identity.lm_head


SHARDS: dict[str, tuple[Tensors, str | None]] = {
    "halves": ({}, None),
    "a bias": ({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}, f"up_proj.bias, .* {ANOTHER}"),
    "another value of a tensor": (
        {"lm_head.weight": torch.ones(160, 64)},
        "both hold the tensor lm_head.weight, with other values",
    ),
}
"""What the second file holds beside its half, which the index does not list -> the sentence."""


@pytest.mark.parametrize("case", SHARDS)
def test_what_only_the_second_file_holds_is_seen(case: str, tmp_path: Path) -> None:
    path, file = save_tiny_target(tmp_path, "llama", num_hidden_layers=4), tmp_path / "model.safetensors"
    tensors, (more, sentence) = load_file(file), SHARDS[case]
    file.unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for half, held in halves.items():
        found = {name: tensors[name] for name in held} | (more if half == "b.safetensors" else {})
        save_file(found, tmp_path / half, {"format": "pt"})
    listed = {name: half for half, held in halves.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    if sentence is None:
        load_target(path)
    else:
        with pytest.raises(UserError, match=sentence):
            load_target(path)


def test_what_a_class_leaves_on_purpose_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek's class leaves model.layers.61: of a smaller model that is a layer which the configuration does not name."""
    file = tmp_path / "model.safetensors"
    for name, refused in (("model.layers.61.eh_proj.weight", False), ("model.layers.61.mlp.up_proj.weight", True)):
        path = save_tiny_target(tmp_path, "deepseek", num_hidden_layers=4)
        save_file(load_file(file) | {name: torch.ones(3)}, file, metadata={"format": "pt"})
        if refused:
            with pytest.raises(UserError, match=f"{name}, .* {ANOTHER}"):
                load_target(path)
        else:
            load_target(path)
            assert f"MTP layers: {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)),
        ("model.embeddings.position_ids", torch.arange(3)),
        ("model.layers.0.self_attn.bias", torch.ones(1, 1, 8, 8).bool()),
        ("model.layers.0.self_attn.masked_bias", torch.tensor(-1e9)),
    ],
)
def test_tables_of_earlier_versions_are_nothing(
    name: str, value: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_target(spoiled(tmp_path, lambda tensors: tensors | {name: value}))
    assert "is used without" not in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="where transformers keeps float8")
@torch.no_grad()
def test_fine_grained_float8_is_read_with_its_scales(tmp_path: Path) -> None:
    def dequantized(name: str, value: Tensor) -> Tensors:
        return {f"{name}.weight": _float8(value).float() * _scale(value)}

    ids = torch.arange(3, 40)[None]
    quantized = spoiled(tmp_path / "a", each(fine_grained), quantization_config=FINE_GRAINED)
    found = load_target(quantized, dtype="float32").model(ids).logits
    truth = load_target(spoiled(tmp_path / "b", each(dequantized))).model(ids).logits
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [0, 1])
def test_weights_go_straight_to_a_gpu(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, Any] = {}
    path, where = save_tiny_target(tmp_path, "llama"), torch.device("cuda", index)
    load = AutoModelForCausalLM.from_pretrained

    def seen(*args: Any, **options: Any) -> Any:
        before.update(options)
        loaded = load(*args, **options)
        before["tensors"] = [*loaded[0].parameters(), *loaded[0].buffers()]
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", seen)
    with pretended_gpu(2) as gpu:
        model = load_target(path, device=where).model
        assert before["device_map"] == {"": where}
        assert {x.device for x in before["tensors"]} == {where}
        loaded = {id(x) for x in before["tensors"]}
        joined = {name.split(".")[-2] for name, x in model.named_parameters() if id(x) not in loaded}
        assert joined == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, (
            "and these are parts of one matrix there"
        )
        assert {copy.way for copy in gpu.counts.copies} == {"host to device, pageable"}
    assert load_target(path).device.type == "cpu"
    assert before["device_map"] is None


def test_a_target_larger_than_its_gpu_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pretended_gpu(), pytest.raises(UserError, match=r"out of memory.*or take a device with more free memory"):
        load_target(save_tiny_target(tmp_path, "llama"), device="cuda")
