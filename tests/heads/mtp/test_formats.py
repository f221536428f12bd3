"""MTP layers in targets' own files: read by both families' names, refused by name, and what they read is measured."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.cli.main import main
from draftsmith.data.batch import Tokenized
from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.conformance.recorded_drafts import record
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle.base import EagleDrafter
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.recognise import is_head_config, load_head
from draftsmith.heads.mtp.formats import load_native
from draftsmith.heads.mtp.head import ROUTING_BIAS, MtpOptions, build
from draftsmith.stages.importing import first_drafts, is_unsettled
from draftsmith.target.folder import hash_tensor, read_directory
from draftsmith.target.target import Target, load_target
from tests.batches import same_logits
from tests.helpers import write_rows
from tests.models import make_target
from tests.natives import (
    LAYERS,
    NAMES,
    OWN_LAYERS,
    add_tensors,
    knowing_layer,
    native_model,
    save_native,
    save_own_layer,
    set_keys,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
IDS = torch.arange(7, 60)
"""As many tokens as a layer 64 wide can know by heart."""


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Tensor]]:
    """Layers for `native_model("qwen3")`, by the states that they read."""
    model = native_model("qwen3")
    return {state: knowing_layer(model, IDS, state) for state in ("after_norm", "before_norm")}


@pytest.mark.parametrize("kind", NAMES)
def test_the_layer_is_read_by_the_names_of_its_family(kind: str, tmp_path: Path) -> None:
    model = native_model(kind)
    layer = knowing_layer(model, IDS, "after_norm")
    folder = save_native(tmp_path / "target", kind, layer, model)
    if kind == "glm4_moe":  # copies of the target's own, as DeepSeek's files have them
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        copies = {
            "embed_tokens.weight": model.model.embed_tokens.weight,
            "shared_head.head.weight": model.lm_head.weight,
        }
        add_tensors(folder, {prefix + name: value.detach().clone() for name, value in copies.items()})
    target = load_target(str(folder))
    head = load_native(folder, target)
    state = head.state_dict()
    assert all(torch.equal(state[name], value) for name, value in layer.items())
    assert head.options.qk_norm
    assert head.config.rope_parameters["rope_theta"] == 10000.0
    assert not is_head_config(folder / "config.json")
    with pytest.raises(UserError, match="`draftsmith import` with a recipe of that target"):
        load_head(folder, target)


@pytest.mark.parametrize("state", ["after_norm", "before_norm"])
def test_states_that_the_layer_was_not_made_for_give_fewer_first_drafts(
    state: str, known: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = save_native(tmp_path / "target", "qwen3", known[state], native_model("qwen3"))
    target = load_target(str(folder))
    sample = Tokenized(IDS, torch.ones(len(IDS), dtype=torch.bool), "", "")
    for read in known:
        right = first_drafts(load_native(folder, target, read).eval(), target, [sample])
        assert len(right) == len(IDS) - 2
        assert right.all() if read == state else right.double().mean() < 0.5


def test_import_measures_both_states_and_writes_the_better_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = native_model("qwen3")
    talk = write_rows(tmp_path / "talk.jsonl", *[
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "no yes maybe"}]} for i in "ab"
    ])  # fmt: skip
    folder = save_native(tmp_path / "target", "qwen3", knowing_layer(model, IDS, "after_norm"), model)
    words = ["--method", "mtp", "--target.path", str(folder), "--target.device", "cpu", "--data.sources", f"[{talk}]"]
    words += ["--data.heldout", "1", "--answers.regenerate", "false", "--output_dir", str(tmp_path / "run")]
    assert main(["import", *words]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == str(tmp_path / "run-import")
    record = json.loads((tmp_path / "run-import" / "import.json").read_text())
    both = record["agreement"]
    assert list(both) == ["after_norm", "before_norm"]
    assert record["target_state"] == max(both, key=lambda one: both[one])
    assert record["positions"] > 10
    line = next(one for one in captured.err.splitlines() if "import:" in one)
    assert all(f"{share:.1%}" in line for share in both.values())
    assert line.endswith(f"the head reads {record['target_state']}")
    target = load_target(str(folder))
    head = load_head(tmp_path / "run-import", target)
    assert head.options.target_state == record["target_state"]
    assert main(["import", *words, "--head.target_state", "vllm", "--output", str(tmp_path / "served")]) == 0
    assert load_head(tmp_path / "served", target).options.target_state == "vllm"
    assert (head.target_norm is not None) == (record["target_state"] == "before_norm")
    # Texts that the layer does not know measure nothing.
    assert f"warning: import: {record['positions']} positions do not tell the two states apart" in captured.err
    assert main(["import", *words]) == 0
    (tmp_path / "run-import" / "import.json").unlink()
    kept = (tmp_path / "run-import" / "model.safetensors").read_bytes()
    assert main(["import", *words]) == 2
    assert "run-import holds files but no import.json, so no import wrote it: name another" in capsys.readouterr().err
    assert (tmp_path / "run-import" / "model.safetensors").read_bytes() == kept


@pytest.mark.parametrize(
    ("better", "worse", "unsettled"),
    [(0, 0, True), (1, 0, True), (4, 0, True), (5, 0, False), (60, 40, True), (40, 61, False)],
)
def test_states_are_told_apart_by_two_standard_errors_of_the_paired_difference(
    better: int, worse: int, unsettled: bool
) -> None:
    one = torch.tensor([True] * better + [False] * worse + [True] * 500)
    other = torch.tensor([False] * better + [True] * worse + [True] * 500)
    assert is_unsettled(one, other) == is_unsettled(other, one) == unsettled


LIES = {
    "no tensors": ({}, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1, but its files hold none"),
    "nothing": ({}, {}, "num_nextn_predict_layers None, but its files hold none"),
    "two": (None, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2, but its files hold them under"),
    "denied": (None, {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers 0, but its files hold them under"),
    "shape": ({"fc.weight": torch.ones(64, 64)}, {}, r"fc.weight has shape \[64, 64\]"),
    "width": ({"layers.0.mlp.up_proj.weight": torch.ones(90, 64)}, {}, r"up_proj.weight has shape \[90, 64\]"),
    "lost": ({"hnorm.weight": None}, {}, "lacks the tensor hnorm.weight"),
    "experts": ({"layers.0.mlp.gate.weight": torch.ones(4, 64)}, {}, "the head is a mixture of experts, which is not"),
    "mla": ({"layers.0.self_attn.kv_b_proj.weight": torch.ones(4, 4)}, {}, r"compresses its keys and values \(MLA\)"),
    "own ends": ({"layers.0.embed_tokens.weight": torch.ones(4, 4)}, {}, "embed_tokens.weight, which is not the target's"),
    "integers": ({"hnorm.weight": torch.ones(64, dtype=torch.int8)}, {}, "hnorm.weight as torch.int8: give a target"),
    "order": (None, {"mtp_hidden_states_first": True}, "reads states before embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_layer_that_is_not_as_the_configuration_says_is_one_sentence(
    case: str, known: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    changes, keys, words = LIES[case]
    layer = known["after_norm"]
    layer = layer if changes is None else {**layer, **changes} if changes else {}
    tensors = {name: value for name, value in layer.items() if value is not None}
    model = native_model("qwen3")
    # Whose names any target's files may have.
    folder = save_native(tmp_path / "target", "glm4_moe", tensors, model, num_nextn_predict_layers=None)
    set_keys(folder, **keys)
    target = Target(model, path="tiny", fingerprint="0")
    with pytest.raises(UserError, match=words) as caught:
        load_native(folder, target)
    assert "\n" not in str(caught.value)


def sharded(folder: Path) -> None:
    """Split a saved model into three files with an index, the MTP layer over two of them."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(held, key=lambda name: ("mtp" in name, name))
    parts = [names[:9], names[9:-6], names[-6:]]
    files = {f"model-0000{i}-of-00003.safetensors": part for i, part in enumerate(parts, 1)}
    for file, part in files.items():
        save_file({name: held[name] for name in part}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("split", [False, True])
def test_an_export_is_the_targets_directory_with_the_layer_in_it(
    split: bool, known: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Imported and exported again, it holds the same bits; trained on, all but the layer."""
    model = native_model("qwen3").bfloat16()
    layer = {name: value.bfloat16() for name, value in known["after_norm"].items()}
    folder = save_native(tmp_path / "target", "qwen3", layer, model)
    if split:
        sharded(folder)
    for file in folder.iterdir():
        file.chmod(0o640)
    target = load_target(str(folder), dtype="float32")
    head = load_native(folder, target)
    again = export_head(head, target, tmp_path / "same")
    before, after = ({span.name: hash_tensor(span) for span in read_directory(one)} for one in (folder, again))
    assert after == before
    assert {"config.json", "tokenizer.json"} <= {file.name for file in again.iterdir()}
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert same_logits(load_head(again, target), head, target)
    with torch.no_grad():
        head.fc.weight += 1.0
    export_head(head, target, again)
    after = {span.name: hash_tensor(span) for span in read_directory(again)}
    assert {name for name in before if after[name] != before[name]} == {"mtp.fc.weight"}
    assert {span.name: hash_tensor(span) for span in read_directory(folder)} == before
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o640}
    served = load_target(str(again), dtype="float32")
    assert torch.equal(served.forward(IDS[None]).last, target.forward(IDS[None]).last)
    assert same_logits(load_native(again, served), load_head(again, target), target)


@pytest.mark.parametrize("case", OWN_LAYERS)
def test_a_layer_like_the_targets_own_is_imported_and_exported_bit_by_bit(case: str, tmp_path: Path) -> None:
    folder = save_own_layer(tmp_path / "target", case, IDS, "before_norm")
    held = load_file(folder / "model.safetensors")
    halves = {name: value if name.endswith(ROUTING_BIAS) else value.bfloat16() for name, value in held.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    target = load_target(str(folder), dtype="float32")
    sample = Tokenized(IDS, torch.ones(len(IDS), dtype=torch.bool), "", "")
    heads = {state: load_native(folder, target, state).eval() for state in ("after_norm", "before_norm")}
    after, before = (float(first_drafts(head, target, [sample]).double().mean()) for head in heads.values())
    assert before > 0.5 > 0.2 > after
    again = export_head(heads["after_norm"], target, tmp_path / "same")
    hashes, same = ({span.name: hash_tensor(span) for span in read_directory(one)} for one in (folder, again))
    assert hashes == same
    save_head(heads["before_norm"], tmp_path / "head", target)
    assert same_logits(load_head(tmp_path / "head", target), heads["before_norm"], target)
    expert = f"model.layers.{LAYERS}.mlp.experts.3.up_proj.weight"
    if expert in halves:
        save_file({n: x for n, x in halves.items() if n != expert}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=r"lacks the tensor layers.0.mlp.experts.3.up_proj.weight of its MTP layer"):
            load_native(folder, target)


@pytest.mark.parametrize("split", [False, True])
def test_a_target_without_a_layer_gets_one(split: bool, tmp_path: Path) -> None:
    folder = save_native(tmp_path / "target", "qwen3", {}, native_model("qwen3"), mtp_num_hidden_layers=None)
    if split:
        sharded(folder)
    save_file({"projector": torch.ones(3)}, folder / "projector.safetensors")  # which the target is not read from
    target = load_target(str(folder))
    head = build(MtpOptions(qk_norm=True), target, None)
    again = export_head(head, target, tmp_path / "out")
    assert (again / "projector.safetensors").read_bytes() == (folder / "projector.safetensors").read_bytes()
    assert same_logits(load_native(again, target), head, target)
    assert json.loads((again / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert load_target(str(again)).num_layers == 2


def test_a_target_with_several_layers_takes_none_before_training(tmp_path: Path) -> None:
    model = native_model("glm4_moe")
    folder = save_native(tmp_path / "target", "glm4_moe", {}, model, num_nextn_predict_layers=2)
    target = Target(model, path="tiny", fingerprint="0", directory=folder)
    with pytest.raises(
        UserError, match=r"^The configuration of the target tiny asks for 2 MTP layers, and this head is one"
    ):
        convert_head(build(MtpOptions(qk_norm=True), target, None), target, layout="mtp")


@pytest.mark.parametrize("case", [None, "deepseek", "glm4_moe"])
def test_answers_and_drafts_are_those_of_transformers(case: str | None, tmp_path: Path) -> None:
    """Its generate(use_mtp=True) decoded the same files: rounds are [root, draft, accepted]; half of the answer the layer knows."""
    file = "expected.json" if case is None else "own_layers.json"
    expected = json.loads((FIXTURES / "transformers_mtp" / file).read_text())
    expected = expected if case is None else expected[case]
    prompt, answer = expected["prompt"], expected["answer"]
    known = torch.tensor([*prompt, *answer][:40])
    if case is None:
        model = native_model("glm4_moe", vocab_size=120, eos_token_id=None)
        save_native(tmp_path / "target", "glm4_moe", knowing_layer(model, known, "after_norm"), model)
    else:
        save_own_layer(tmp_path / "target", case, known, vocab_size=120)
    target = load_target(str(tmp_path / "target"))
    drafter = EagleDrafter(load_native(tmp_path / "target", target).eval(), 1)
    request = Request("one", "all", tuple(prompt), len(answer), ignore_eos=True)
    decoded, (drafted,) = record(target, drafter, [request], Sampling(temperature=0.0), rows=1)
    (generation,) = decoded.generations
    assert generation.output_ids == answer
    rounds = zip(generation.rounds, drafted, strict=True)
    found = [[one.root, *draft.tokens, one.accepted] for one, draft in rounds]
    assert found == expected["rounds"]


def test_drafts_are_those_of_vllm(tmp_path: Path) -> None:
    """A GLM-4 MoE target decoded by vLLM itself: rounds are [*drafts, accepted]; near an answer's end it drafts as many as ever. States
    as transformers feeds them make others."""
    (first, second) = json.loads((FIXTURES / "vllm_mtp" / "glm4_moe.json").read_text())["answers"]
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    known = torch.tensor([*first["prompt"], *first["answer"]])
    folder = save_own_layer(tmp_path / "target", "glm4_moe", known, **sizes)
    # The first token counts, and so does what is read of it later.
    held, prefix = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    fc, out = held[f"{prefix}eh_proj.weight"].clone(), held[f"{prefix}self_attn.o_proj.weight"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        fc[:, :64] = torch.randn(64, 64) * 0.5
    add_tensors(folder, {f"{prefix}eh_proj.weight": fc, f"{prefix}self_attn.o_proj.weight": out * 8})
    target = load_target(str(folder))
    equal = {}
    for state in ("vllm", "after_norm"):
        drafter = EagleDrafter(load_native(folder, target, state).eval(), 3)
        requests = [Request("", "all", tuple(one["prompt"]), 24, ignore_eos=True) for one in (first, second)]
        decoded, drafted = record(target, drafter, requests, Sampling(temperature=0.0), rows=1)
        assert [one.output_ids for one in decoded.generations] == [first["answer"], second["answer"]]
        found = [draft.tokens for drafts in drafted for draft in drafts]
        served = [one[:-1] for answer in (first, second) for one in answer["rounds"]]
        equal[state] = [list(mine) == theirs[: len(mine)] for mine, theirs in zip(found, served, strict=True)]
    assert all(equal["vllm"])
    assert sum(equal["after_norm"]) < 0.2 * len(equal["after_norm"])


@pytest.mark.parametrize(
    "other",
    [{"mtp.layers.0.mlp.gate.weight": torch.ones(4, 64)}, {"mtp.fc.weight": torch.ones(64, 128, dtype=torch.int8)}],
)
def test_a_layer_of_another_kind_is_not_replaced(other: dict[str, Tensor], tmp_path: Path) -> None:
    model = native_model("qwen3")
    folder = save_native(tmp_path / "target", "qwen3", {}, model)
    add_tensors(folder, other)
    target = Target(model, path="tiny", fingerprint="0", directory=folder)
    with pytest.raises(
        UserError, match=f"holds {next(iter(other))}, so its own MTP layer is of another kind or quantized"
    ):
        export_head(build(MtpOptions(qk_norm=True), target, None), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


UNLIKE = {
    "rotation": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, {}, {},
                 r"asks for an MTP layer that turns a part of each head by position \(partial_rotary_factor 0.5\), .* set head.layer to target, or train"),
    "heads": ({}, {"num_attention_heads": 2, "head_dim": 32}, {}, "has num_attention_heads 4, and the head 2, so this"),
    "width": ({}, {"intermediate_size": 48}, {}, r"holds \S*layers.1.mlp.\S* of shape .*96.*, and the head one of .*48"),
    "norms": ({}, {"qk_norm": False}, {}, r"holds model.layers.1.self_attn.._norm.weight, and the head no such tensor"),
    "no norms": ({"use_qk_norm": False}, {}, {}, r"holds no layers.1.self_attn.q_norm.weight, and the head does"),
    "experts": ({"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}, {}, {},
                r"holds model.layers.1.mlp.\S*(experts|gate)\S*, and the head no such tensor"),
    "own layer": ({}, {}, {"model.layers.2.mlp.up_proj.weight": torch.ones(90, 64), "model.layers.2.self_attn.q_proj.weight": torch.ones(64, 64)},
                  r"holds model.layers.2.mlp.up_proj.weight of shape \[90, 64\], and the head one of \[96, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
def test_a_head_that_the_targets_configuration_contradicts_is_refused_before_training(
    case: str, tmp_path: Path
) -> None:
    overrides, options, other, words = UNLIKE[case]
    model = native_model("glm4_moe", **overrides)
    folder = save_native(tmp_path / "target", "glm4_moe", {}, model)
    add_tensors(folder, other)
    target = Target(model, path="tiny", fingerprint="0", directory=folder)
    with pytest.raises(UserError, match=words) as caught:
        convert_head(build(MtpOptions(**{"qk_norm": True, **options}), target, None), target, layout="mtp")
    assert "\n" not in str(caught.value)


def test_states_before_a_norm_that_subtracts_the_mean_cannot_be_read() -> None:
    with pytest.raises(
        UserError, match=r"head\.target_state is 'before_norm', but the states before the final norm of tiny"
    ):
        build(MtpOptions(target_state="before_norm"), make_target("cohere", num_hidden_layers=2), None)
