"""Targets that read images too: their text alone is used, by the positions that transformers gives it; or refused by name."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from draftsmith.data.batch import Tokenized
from draftsmith.data.features.extract import compute_features
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.conformance.spec import Spec
from draftsmith.eval.conformance.suite import (
    check_decoding_equals_training,
    check_exports,
    check_simulation,
    check_trees,
)
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.export.export import export_head
from draftsmith.heads.mtp.head import MtpOptions, build
from draftsmith.target.pretrained import load_config
from draftsmith.target.shape import shape_of
from draftsmith.target.target import load_target

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
KINDS = {
    "qwen2_5_vl": (ROPE, {}),
    "qwen3_vl": (ROPE, {"deepstack_visual_indexes": [0]}),
    "gemma3": ({"sliding_window": 8}, {}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 32}),
    "idefics3": ({"model_type": "llama"}, {}),
}


def save(kind: str, folder: Path, text: dict = {}, vision: dict = {}) -> Path:  # noqa: B006
    """Save a small model with random weights."""
    config = AutoConfig.for_model(kind, text_config=TEXT | text, vision_config=VISION | vision)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_for_its_text_goes_the_whole_way(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path, *KINDS[kind])
    target = load_target(str(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 150, (12,), generator=torch.Generator().manual_seed(1))
    seen = model(ids[None], output_hidden_states=True)
    (read,) = compute_features(
        target, [Tokenized(ids, torch.ones(12, dtype=torch.bool), "", "")], (1, 3), torch.float32
    )
    streams = torch.cat([seen.hidden_states[1], seen.hidden_states[3]], -1)[0]
    torch.testing.assert_close(read.aux, streams, rtol=1e-4, atol=1e-4)
    written = model.generate(ids[None], max_new_tokens=16, do_sample=False, eos_token_id=[2], pad_token_id=0)
    request = Request("p", "", tuple(ids.tolist()), 16)
    (answer,) = decode_batch(target, TargetAlone(), [request], Sampling()).generations
    assert answer.output_ids == written[0, 12:].tolist()
    spec = Spec("eagle3", Eagle3Options(layer_ids=[0, 1, 3], ttt_steps=3), target, steps=5)
    for check in (check_decoding_equals_training, check_simulation, check_trees, check_exports):
        check(spec)
    assert "mrope_section" not in spec.head.config.rope_parameters
    assert shape_of(load_config(str(folder)), 4).layers == 4


def test_no_mtp_layer_is_added_to_a_larger_model(tmp_path: Path) -> None:
    """It would lie where none of its layers does, beside a configuration of the text alone."""
    target = load_target(str(save("qwen3_vl", tmp_path / "target", *KINDS["qwen3_vl"])))
    with pytest.raises(
        UserError, match=r"holds its language model in a larger one \(qwen3_vl\) and came without an MTP layer"
    ):
        export_head(build(MtpOptions(qk_norm=True), target, None), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "text", "vision", "words"),
    [
        ("mllama", {"cross_attention_layers": [1]}, {}, "some of its layers attend to an image alone"),
        (
            "paligemma",
            {"model_type": "gemma"},
            {"model_type": "siglip_vision_model"},
            "lets later tokens change earlier",
        ),
    ],
)
def test_one_whose_text_is_no_model_of_its_own_is_refused(kind, text, vision, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load_target(str(save(kind, tmp_path, text, vision)))
