"""Medusa-2: the tuned target beside the original, the joint loss, what is deployed, compared and exported."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.answers import total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.clocks.turns import run_systems
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.measure.texts import Originals, check_lossless, collect_texts, compare_targets, distinct
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.eval.tree_search.search import FoundTree, measure_tree_costs
from draftsmith.heads.export.export import export_head
from draftsmith.heads.export.tuned import write_adapter, write_merged
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import build as build_medusa
from draftsmith.heads.medusa2 import Medusa2Options
from draftsmith.heads.medusa2.head import Medusa2Head, build
from draftsmith.heads.warm_start import adopt_options, restart
from draftsmith.recipe.schema import TrainSpec
from draftsmith.target.pretrained import check_target
from draftsmith.target.target import Target, load_target
from draftsmith.train.schedule import build_optimizers
from tests.batches import documents_of, pack
from tests.heads.blocks import requests
from tests.models import make_target, tiny_model

pytestmark = pytest.mark.full


def changed(target: Target, options: Medusa2Options | None = None, size: float = 0.03) -> Medusa2Head:
    """Heads and an adapter that does something, without dropout."""
    torch.manual_seed(0)
    head = build(options or Medusa2Options(3, lora_r=4), target, None).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return head


@cache
def example() -> tuple[Target, Medusa2Head, TrainBatch]:
    target = make_target()
    return target, changed(target), pack(target, documents_of(target), ())


def seeded(batch: TrainBatch, seed: int) -> TrainBatch:
    return replace(batch, seed=torch.full_like(batch.ids, seed))


def states_of(head: Medusa2Head, batch: TrainBatch) -> torch.Tensor:
    plan = head.plan(batch, 1)
    return head.tuned.states(batch, plan.passes, plan.draw)


def test_without_the_adapter_the_states_are_the_stored_ones_bit_by_bit() -> None:
    target, head, _ = example()
    batch = pack(target, documents_of(target, ((30,), (30,), (30,))), ())
    stored = target.forward(batch.ids).last  # in one pass, as extraction has it
    with head.tuned.model.disable_adapter():
        assert torch.equal(states_of(head, batch), stored)
    assert float((states_of(head, batch).detach() - stored).abs().max()) > 0.1
    new_tokens = build(Medusa2Options(2), target, None).eval()
    assert torch.equal(states_of(new_tokens, batch), stored), "a new adapter changes nothing"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "granite", "mixtral"])
def test_packed_documents_are_read_apart_and_merging_changes_nothing(kind: str) -> None:
    target = make_target(kind)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    head = changed(target, Medusa2Options(2, lora_r=4), 0.01)
    batch = pack(target, documents_of(target), ())
    with torch.no_grad():
        states, last = states_of(head, batch), batch.last
    assert float((states - last).abs().max()) > 1e-3
    assert not states[batch.document < 0].any()
    merged = pack(head.deployed(target).verifier(target), documents_of(target), ())  # each document alone
    torch.testing.assert_close(states, merged.last, atol=2e-4, rtol=2e-4)
    assert torch.equal(pack(target, documents_of(target), ()).last, last), "the original is as it was"
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_a_tuned_projection_keeps_scale_and_softcap(kind: str) -> None:
    target = make_target(kind, tie_word_embeddings=False)
    check_target(target)  # finds them
    assert (target.head.scale, target.head.softcap) == {"gemma2": (1.0, 2.0), "cohere": (0.25, None)}.get(
        kind, (1.0, None)
    )
    head = changed(target, Medusa2Options(2, original_lm_head=True, lora_r=4, tune_lm_head=True))
    ids = documents_of(target)[1][0][None]
    with torch.no_grad():
        expected = head.tuned.model(input_ids=ids, use_cache=False).logits
        states = head.tuned.decoder(input_ids=ids, use_cache=False).last_hidden_state
        found, merged = head.tuned.logits(states), head.deployed(target).verifier(target)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(merged.head.logits(merged.forward(ids).last), expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(head.logits(0, states), head.tuned.logits(head.blocks[0](states)))
    assert float((target.head.logits(states) - found).abs().max()) > 0.01


def test_the_heads_loss_reaches_the_adapter_and_the_weights_stand_for_what_they_say() -> None:
    target, head, batch = example()

    def gradients(share: float, **changes: float) -> tuple[float, float]:
        head.zero_grad()
        spec = LossSpec(kind="hard_ce", **changes)
        head_loss(head(batch, 3), batch, target.head, None, spec, progress=share).loss_sum.backward()
        sums = [
            sum(
                float(p.grad.abs().sum())
                for n, p in head.named_parameters()
                if n.startswith(part) and p.grad is not None
            )
            for part in ("adapter.", "blocks.")
        ]
        head.zero_grad()
        return sums[0], sums[1]

    assert all(value > 0 for value in gradients(1.0, tuned_weight=0.0))
    adapter, blocks = gradients(0.0, ramp=0.5)
    assert adapter > 0
    assert blocks == 0, "at the start of the ramp the target alone learns"
    whole, part = gradients(1.0, weight=1.0)[1], gradients(1.0)[1]
    assert part == pytest.approx(0.2 * whole, rel=1e-4), "0.2 beside the tuned target's loss"


def test_the_ramp_is_a_sine() -> None:
    spec = LossSpec(ramp=0.5)
    shares = [spec.warmup_weight(x) for x in (0.0, 0.25, 0.5, 1.0)]
    assert shares == pytest.approx([0.0, 0.5**0.5, 1.0, 1.0])
    assert LossSpec().warmup_weight(0.0) == 1.0


def test_dropout_is_drawn_from_the_batch() -> None:
    target, _, batch = example()
    head = changed(target, Medusa2Options(2, lora_r=4, lora_dropout=0.5)).train()
    torch.manual_seed(1)
    first, state = states_of(head, seeded(batch, 5)), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(states_of(head, seeded(batch, 5)), first)
    assert not torch.equal(states_of(head, seeded(batch, 6)), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"
    assert torch.equal(states_of(head.eval(), batch), states_of(head, seeded(batch, 6)))


def test_the_tuned_projection_draws_nothing() -> None:
    """It is called for every head, apart from the states: with dropout, processes and accumulation would change it."""
    target = make_target(tie_word_embeddings=False)
    batch = pack(target, documents_of(target), ())
    head = changed(target, Medusa2Options(2, lora_r=4, lora_dropout=0.5, tune_lm_head=True)).train()
    state = states_of(head, seeded(batch, 5))
    torch.manual_seed(1)
    first = head.tuned.logits(state)
    torch.manual_seed(2)
    assert torch.equal(head.tuned.logits(state), first)
    assert not torch.equal(first, target.head.logits(state)), "the projection is tuned"
    assert any(isinstance(m, torch.nn.Dropout) for m in head.adapter.modules()), "the layers below it do draw"


def test_the_adapter_learns_at_its_own_rate_and_not_by_muon() -> None:
    _, head, _ = example()
    muon, adamw = build_optimizers(head, TrainSpec(optimizer="muon", lr=1e-2))
    assert sum(len(group["params"]) for group in muon.param_groups) == 3
    rates = {group["peak_lr"]: len(group["params"]) for group in adamw.param_groups}
    adapters = sum(name.startswith("adapter.") for name, _ in head.named_parameters())
    assert rates == {1e-2: 6, 2.5e-3: adapters}


def test_training_starts_from_medusa_1() -> None:
    target, _, batch = example()
    torch.manual_seed(0)
    first = build_medusa(MedusaOptions(3, 2), target, None).eval()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    options = adopt_options(Medusa2Options(3, 2, lora_r=4), first, target, "run")
    head = restart(first, options, target, "medusa2").eval()
    assert isinstance(head, Medusa2Head)
    ours, theirs = head(batch, 3), first(batch, 3)
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=1e-4)


def test_training_goes_on_with_another_dropout_and_rate() -> None:
    target, head, _ = example()
    options = replace(head.options, lora_dropout=0.3, adapter_lr=0.1)
    again = restart(head, adopt_options(options, head, target, "run"), target)
    assert again.options == options  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"head.lora_r is 8, but the head that train.warm_start names \(run\) has 4"):
        adopt_options(replace(options, lora_r=8), head, target, "run")


def test_what_is_deployed_is_lossless_to_the_tuned_target_and_compared_with_the_original() -> None:
    target, head, _ = example()
    deployed = head.deployed(target).eval()
    verifier = deployed.verifier(target)
    assert verifier is not target
    system = head_system("medusa2", deployed, 3, 3, verifier=verifier)
    plain = head_system("medusa", build_medusa(MedusaOptions(3), target, None).eval(), 3, 3)
    assert (system.name, system.info.tuned, system.info.lossy) == ("medusa2, tuned target", True, False)
    assert system.info.parameters == sum(p.numel() for p in head.parameters())
    greedy = check_lossless(target, [system, plain], requests(6, 12), Sampling())
    for name in greedy:
        one = greedy[name]["overall"]
        assert one.equal == one.checked == 6
        assert one.tau == pytest.approx(one.tau_simulated, abs=1e-9)
    timings = run_systems(target, [system], [requests(6, 12)], Sampling(), batch=2).by_name
    texts = {
        name: {g.request.sample_id: g.output_ids for d in timings[name][0] for g in d.generations}
        for name in ("", system.name)
    }
    for name, own in (("", target), (system.name, verifier)):
        alone = decode_batch(own, TargetAlone(), requests(6, 12), Sampling()).generations
        assert texts[name] == {g.request.sample_id: g.output_ids for g in alone}
    assert texts[""] != texts[system.name]
    originals = Originals(target, distinct(timings[""], Sampling()), lambda generation: {})
    change = collect_texts(target, system, timings, Sampling(), originals).fields["overall"]
    assert set(change) == {"perplexity", "perplexity_baseline", "agreement", "kl"}
    assert change["perplexity"] > change["perplexity_baseline"] > 1, "greedy texts are the original's likeliest"
    assert 0 < change["agreement"] < 1
    assert change["kl"] > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0, repetition_penalty=1.3)])
def test_training_scores_drafts_by_the_tuned_target(sampling: Sampling) -> None:
    """On the tuned target's own greedy texts, what held-out answers are scored by is what the deployed heads have."""
    target, head, _ = example()
    deployed = head.deployed(target).eval()
    verifier = deployed.verifier(target)
    own = decode_batch(verifier, TargetAlone(), requests(6, 12), sampling).generations
    expected = head_simulator(deployed)(verifier, own, sampling, 3).tallies
    found = head_simulator(head)(target, own, sampling, 3).tallies
    assert [t[2].tau for t in found] == pytest.approx([t[2].tau for t in expected], abs=1e-9)
    assert total((t[2] for t in found), 3).tau > 1.0


def test_the_trees_of_a_tuned_target_are_timed() -> None:
    target, head, _ = example()
    deployed = head.deployed(target).eval()
    trees = [StaticTree.of(f"{n} nodes", [[rank] for rank in range(n)]) for n in (1, 3)]
    found = [FoundTree(tree, 1.5, 1.5) for tree in trees]
    costs = measure_tree_costs(deployed.verifier(target), deployed, found, [5, 6, 7], Sampling())
    assert all(costs.budget(one).draft_ms > 0 for one in found)


def test_two_targets_are_compared_token_by_token() -> None:
    target, head, _ = example()
    tuned = head.deployed(target).verifier(target)
    texts = decode_batch(target, TargetAlone(), requests(5, 12), Sampling(1.0)).generations
    same, apart, count = 0, 0.0, 0
    for text in texts:
        ids = torch.tensor([[*text.request.prompt_ids, *text.output_ids]])
        first = len(text.request.prompt_ids)
        p, q = (
            one.model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].double().log_softmax(-1)
            for one in (target, tuned)
        )
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        apart += float((p.exp() * (p - q)).sum())
        count += len(p)
    found = compare_targets(target, tuned, texts)
    assert found.keys() == {"overall", "a", "b"}
    assert found["overall"]["agreement"] == pytest.approx(same / count)
    assert found["overall"]["kl"] == pytest.approx(apart / count, rel=1e-4)
    nothing = compare_targets(target, target, texts)["overall"]
    assert (nothing["agreement"], nothing["kl"]) == (1.0, pytest.approx(0.0, abs=1e-12))


def test_the_tuned_target_and_the_adapter_are_exported(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "original")
    (tmp_path / "original" / "tokenizer.json").write_text("{}")
    target = load_target(str(tmp_path / "original"))
    head = changed(target)
    deployed = head.deployed(target)
    tuned, ids = deployed.verifier(target), torch.arange(3, 20)[None]
    expected = head.tuned.model(input_ids=ids, use_cache=False).logits
    made_for = write_merged("medusa2", target, tuned, tmp_path / "target")
    merged = load_target(str(tmp_path / "target"))
    torch.testing.assert_close(merged.model(input_ids=ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    export_head(deployed, tuned, tmp_path / "heads", layout="medusa_vllm", made_for=made_for, target_note="Beside it.")
    assert "Beside it." in (tmp_path / "heads" / "README.md").read_text()
    assert load_head(tmp_path / "heads", merged).method == "medusa"
    with pytest.raises(UserError, match=r"weights of the target .* are not those the head"):
        load_head(tmp_path / "heads", target)
    alone = write_adapter("medusa2", head.tuned, tmp_path / "adapter")
    assert not any(module.training for module in head.modules())
    assert not head.tuned.decoder.training
    assert (alone.fingerprint, alone.weights) == (head.tuned.fingerprint, None)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(adapted(input_ids=ids, use_cache=False).logits, expected)
    assert {str(x.dtype) for x in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()} == {
        "torch.float32"
    }
    write_adapter("medusa2", head.tuned, tmp_path / "adapter")  # again, over the earlier one
    (tmp_path / "target" / "mine.gguf").write_text("made of the merged target")
    with pytest.raises(UserError, match=r"it holds \['mine.gguf'\]"):
        write_merged("medusa2", target, tuned, tmp_path / "target")
    head.tuned.model.peft_config["default"].bias = "all"
    with pytest.raises(AssertionError, match="the adapter has more than engines read"):
        write_adapter("medusa2", head.tuned, tmp_path / "biased")
    assert not (tmp_path / "biased").exists()
    (tmp_path / "adapter" / "draftsmith.json").unlink()
    with pytest.raises(UserError, match="is not a model folder"):
        write_adapter("medusa2", head.tuned, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"target_modules": ["q_proj", "q_prog"]},
            "head.target_modules names 'q_prog', but no linear layer of the target tiny is called so: choose among "
            "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj.",
        ),
        (
            {"target_modules": ["lm_head"]},
            "head.target_modules names 'lm_head', the output projection: set head.tune_lm_head instead.",
        ),
        (
            {"target_modules": []},
            "head.target_modules is []: name linear layers of the target, or null for all of them.",
        ),
        (
            {"tune_lm_head": True},
            "head.tune_lm_head is true, but the output projection of the target tiny is its input embedding, which would "
            "change with it: leave it out.",
        ),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        build(Medusa2Options(**options), make_target(tie_word_embeddings=True), None)
    assert str(caught.value) == said


def test_names_that_peft_takes_for_fused_experts_are_left_out() -> None:
    """Dense layers and shared experts have the names that the experts had before they were fused."""
    target = make_target("deepseek")
    head = build(Medusa2Options(1, lora_r=4), target, None)
    adapted = {name.split(".")[-3] for name, _ in head.named_parameters() if name.startswith("adapter.")}
    assert adapted == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    for names in (["up_proj"], ["q_a_proj", "mlp.down_proj"]):
        with pytest.raises(
            UserError, match="which peft takes for the fused experts of the target tiny, no linear layers"
        ):
            build(Medusa2Options(1, target_modules=names), target, None)


def test_an_adapter_that_the_dtype_cannot_hold_is_one_sentence() -> None:
    target, head, _ = example()
    with torch.no_grad():
        again = changed(target, head.options)
        again.adapter.get_parameter("layers.0.self_attn.q_proj.lora_B.weight").fill_(3e38)  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match="gives numbers that float32 cannot hold: take another dtype, or train it again"
    ):
        again.deployed(target)


def test_a_list_of_linear_layers_is_not_taken_for_the_decoders_layers() -> None:
    """In a list they are called 0, 1, ..., as the layers of the decoder are."""
    head = build(Medusa2Options(1, lora_r=4), make_target("gemma3n"), None)
    adapted = {name for name, _ in head.named_parameters() if name.startswith("adapter.altup_projections.")}
    assert len(adapted) == 6
    with pytest.raises(UserError, match="not only linear layers are called so"):
        build(Medusa2Options(1, target_modules=["0"]), make_target("gemma3n"), None)


def test_what_no_text_reaches_has_no_adapter() -> None:
    """A vision tower has layers of the same names, and parameters without gradients would stop several processes."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=tiny_model("gemma3", num_hidden_layers=2).config.to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        image_token_id=150,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert hasattr(model.model, "vision_tower")
    target = Target(model, path="tiny", fingerprint="0")
    head, batch = changed(target, Medusa2Options(1, lora_r=4)), pack(target, documents_of(target), ())
    head_loss(head(batch, 1), batch, target.head, None, LossSpec()).loss_sum.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert any("v_proj" in name for name, _ in head.named_parameters())


@pytest.mark.parametrize(("key", "value"), [("tuned_weight", 1.0), ("ramp", 0.5), ("tuned_kind", "hard_ce")])
def test_losses_of_a_tuned_target_need_one(key: str, value: object) -> None:
    target, head, _ = example()
    spec = LossSpec(**{key: value})  # type: ignore[arg-type]
    spec.check_head(head)
    with pytest.raises(UserError, match=f"loss.{key} is {value}, but medusa heads leave the target as it is"):
        spec.check_head(build_medusa(MedusaOptions(2), target, None))
