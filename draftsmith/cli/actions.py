"""What the commands do, a function each: they read a recipe, check it, make its stages, and print what came out."""

import os
import re
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.cli import launching
from draftsmith.cli.boundary import put, tell
from draftsmith.cli.commands import COMMANDS, REDO
from draftsmith.cli.gating import MISSED, Gate, read_gate, result_pairs
from draftsmith.cli.served import ONLY_SERVED, evaluate_served
from draftsmith.data.conversations.show import show_conversation
from draftsmith.errors import UserError
from draftsmith.estimate import estimate as estimating
from draftsmith.estimate.estimator import Estimator
from draftsmith.estimate.figures import device_here, find_device
from draftsmith.eval.gate.compare import compare_results
from draftsmith.eval.planner.decision import check_decision
from draftsmith.eval.report.comparison import COMPARISON_MARK, comparison_markdown, comparison_text
from draftsmith.eval.report.report import REPORT_MARKS, headline_table, write_report
from draftsmith.eval.results.result import read_result
from draftsmith.eval.training.history import read_history
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.recipe.options import require_recipe, take_options
from draftsmith.recipe.parse import parse_recipe, shipped_names, shipped_text
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.chat import Chat, converse
from draftsmith.stages.data import look_at, samples_at_hand
from draftsmith.stages.evaluation import costs_table, result_files, served_costs_table
from draftsmith.stages.exporting import export_folder
from draftsmith.stages.gguf import check_conversion, export_gguf
from draftsmith.stages.importing import import_layer
from draftsmith.stages.pipeline import Made, check_redo, make_stages
from draftsmith.stages.planning import COSTS, plan_stage
from draftsmith.stages.preflight import preflight
from draftsmith.stages.session import Session, choose_device
from draftsmith.stages.tree_search import search_chain, search_tree
from draftsmith.storage import check_file, check_ours, write_json, write_text
from draftsmith.train.process import LAUNCHED, world


def run(own: Namespace, words: list[str]) -> int:
    """Make all stages."""
    gate = read_gate(own)
    session = session_of("run", words, own.redo)
    launch = launching.check_launching(session, own.launch, "run")
    if launch and session.recipe.target.shared:
        launching.launch(session, launch, "run", [*words, *gate.words])
        exported = export_folder(session.recipe, session.recipe.method) if layouts_of(session.recipe.method) else None
        made = Made(results=result_files(session.recipe), export=exported)
    else:
        _check(session, "run", gate)
        if launch and not launching.train(session, launch, words):
            return 0
        made = make_stages(session, "run", show=_show)
    _put(f"\nreport  {session.recipe.run_dir / 'evaluation' / 'report.html'}")
    for path in made.results:
        _put(f"result  {path}")
    _put(f"export  {made.export or 'none: no layout holds such heads'}")
    return _judge(gate, made.results, launch)


def regenerate(own: Namespace, words: list[str]) -> int:
    """Let the target answer the prompts."""
    session = session_of("regenerate", words, own.redo)
    if not session.recipe.answers.regenerate:
        raise UserError("answers.regenerate is false in this recipe: set it to true to let the target answer.")
    launch = launching.check_launching(session, own.launch, "regenerate")
    if not launch:
        session.share_target()
    if world().main:  # the others read no conversations but those that they answer
        look_at(session, session.conversations, learned=False, on_refused=session.recipe.data.on_refused)
    if launch:
        launching.launch(session, launch, "regenerate", words)
    else:
        make_stages(session, "regenerate")
    _put(session.recipe.data_path / "answers.jsonl")
    return 0


def extract(own: Namespace, words: list[str]) -> int:
    """Store hidden states."""
    session = session_of("extract", words, own.redo)
    if session.recipe.features.source == "online":
        raise UserError("features.source is online in this recipe, so nothing is stored: set it to store.")
    launch = launching.check_launching(session, own.launch, "extract")
    if not (launch and session.recipe.target.shared):
        _check(session, "extract")
    if launch:
        launching.launch(session, launch, "extract", words)
    else:
        make_stages(session, "extract")
    _put(session.recipe.data_path / "features")
    return 0


def train(own: Namespace, words: list[str]) -> int:
    """Train the head, after its data have been made."""
    session = session_of("train", words, own.redo)
    launching.check_script(own.script, session.recipe.method)
    launch = launching.check_launching(session, own.launch, "train")
    shared = launch is not None and session.recipe.target.shared  # which this process cannot open alone
    if not shared:
        _check(session, "train")
    if launch and not launching.train(session, launch, words):
        return 0
    _put(session.recipe.run_dir / "train" / "best" if shared else make_stages(session, "train").head)
    return 0


def _check(session: Session, command: str, gate: Gate | None = None, *, decode: bool = True) -> None:
    """Find mistakes in a recipe, and in the names of a gate, in one process."""
    session.share_target()
    if world().main:
        drafters = preflight(session, command)
        if gate is not None:
            gate.check_names(session, drafters, decode=decode)


def _put(result: object) -> None:
    """Print a result, unless the process that launched this one does."""
    if LAUNCHED not in os.environ:
        put(result)


def _judge(gate: Gate, results: list[Path], launch: launching.Launch | None) -> int:
    """Compare results with a gate, in one process: the one that launched others, of several machines the first."""
    return 0 if LAUNCHED in os.environ or not world().main or (launch and launch.machine) else gate.judge(results)


def evaluate(own: Namespace, words: list[str]) -> int:
    """Measure the head, in comparison with the target alone, or running servers."""
    if own.url:
        return evaluate_served(own, words)
    if wrong := next((name for name in ONLY_SERVED if getattr(own, name)), None):
        raise UserError(f"--{wrong.replace('_', '-')} is for running servers: name them with --url, or leave it out.")
    gate, made, decode = read_gate(own), "evaluate --no-decode" if own.no_decode else "evaluate", not own.no_decode
    session = session_of("evaluate", words, own.redo, own.head, made)
    if launch := launching.check_launching(session, own.launch, "evaluate"):
        head = [] if own.head is None else ["--head", str(own.head)]
        launching.launch(session, launch, made, [*words, *head, *gate.words])
        results = result_files(session.recipe, decode=decode)
    else:
        _check(session, "evaluate", gate, decode=decode)
        results = make_stages(session, made, show=_show).results
    for path in results:
        _put(path)
    return _judge(gate, results, launch)


def chat(own: Namespace, words: list[str]) -> int:
    """Answer one prompt, or all that is typed."""
    talk = Chat(session_of("chat", words, [], own.head), own.temperature, own.system, compare=own.compare)
    talk.introduce()
    if own.prompt is None:
        converse(talk)
    else:
        talk.ask(own.prompt)
    return 0


def refuse_redo(name: str, words: list[str], why: str) -> None:
    """Raise UserError for --redo of a command that makes no stage; `why` says so in a clause."""
    if take_options(words, [REDO])[0].redo:
        raise UserError(f"{name} makes no stage of a recipe: leave --redo out, {why}.")


def search(own: Namespace, words: list[str]) -> int:
    """Find a tree."""
    refuse_redo("search-tree", words, "a tree is searched every time")
    session = session_of("search-tree", words, [], own.head)
    if own.chain and own.nodes is not None:
        raise UserError("--nodes is the size of a tree: leave it out with --chain.")
    put(
        search_chain(session, own.temperature, own.output)
        if own.chain
        else search_tree(session, own.nodes, own.temperature, own.output)
    )
    return 0


def costs(own: Namespace, words: list[str]) -> int:
    """Time this machine, or running servers."""
    refuse_redo("costs", words, "costs are measured every time")
    if own.server and own.head is not None:
        raise UserError("--head is for this machine, and the servers of --server have their own heads: leave it out.")
    if own.model and not own.server:
        raise UserError("--model is what servers call the target: name them with --server, or leave it out.")
    session = session_of("costs", words, [], own.head)
    if own.server:
        put(served_costs_table(session, own.output, own.server, own.model))
    else:
        put(costs_table(session, own.output))
    return 0


def quality(own: Namespace, words: list[str]) -> int:
    """Let drafters that change texts answer tasks of lm-eval."""
    refuse_redo("quality", words, "tasks are answered every time")
    names = [name.strip() for name in (own.tasks or "").split(",") if name.strip()]
    if not names:
        raise UserError("quality needs tasks of lm-eval: add --tasks gsm8k, or several with commas between them.")
    session = session_of("quality", words, [], own.head)
    check_file("--output", own.output, (".json",), r'\A\{\n  "schema_version": .*"scores": ')
    try:
        from draftsmith.cli.quality import measure_quality
    except ImportError as error:
        raise UserError(
            f"quality needs lm-eval, which cannot be loaded here ({error}): pip install 'draftsmith[lm-eval]'."
        ) from error
    measure_quality(session, names, own.limit, own.output)
    put(own.output)
    return 0


def export(own: Namespace, words: list[str]) -> int:
    """Write the directory that an engine loads, with --gguf the file that llama.cpp loads."""
    if own.gguf is None and (own.gguf_type or own.gguf_pre):
        alone = "--gguf-type" if own.gguf_type else "--gguf-pre"
        raise UserError(f"{alone} is for conversion: name a llama.cpp source tree with --gguf.")
    session = session_of("export", words, own.redo, own.head)
    preflight(session, "export")
    if own.gguf:
        check_conversion(session, own.gguf)
    exported = make_stages(session, "export").export
    assert exported is not None
    put(export_gguf(session, exported, own.gguf, own.gguf_type, own.gguf_pre) if own.gguf else exported)
    return 0


def report(own: Namespace, words: list[str]) -> int:
    """Render results that are there."""
    output, gate = own.output, read_gate(own)
    writing: AbstractContextManager[None] = nullcontext()
    price, export, again, planned = own.price_per_hour, None, None, True
    if words and not words[0].startswith("-"):
        paths = [Path(word) for word in words]
        if own.redo:
            raise UserError("report makes no stage of files that are named: leave --redo out, or give --recipe.")
    else:
        session = session_of("report", words, own.redo)
        run, export, again = session.run, session.recipe.export, session.again
        planned = bool(session.recipe.evaluate.plan_batches)  # empty makes no plan, whatever an earlier evaluation left
        if price is None and own.costs is None:
            price = session.recipe.evaluate.price_per_hour
        paths = sorted((run.path / "evaluation").glob("*/result.json"))
        if output is None:
            output, writing = run.path / "evaluation", run.writing()
    if not paths:
        raise UserError("There is no result.json to report on: run `draftsmith evaluate` first, or name the files.")
    folder, results = output or paths[0].parent, [read_result(path) for path in paths]
    # A result lies in a folder of its own, t0 or t1, beside the run's table.
    tables = {path.parent.parent / COSTS for path in paths}
    alike = len(tables) == 1 and len({result.settings.temperature for result in results}) == len(results)
    table = own.costs or next((at for at in tables if planned and alike and at.is_file()), None)
    if table is None and own.price_per_hour is not None:
        raise UserError(
            "--price-per-hour needs the costs of a machine: name a table of `draftsmith costs` with --costs."
        )
    run_folder = paths[0].absolute().parent.parent.parent  # .../RUN/evaluation/t0/result.json
    trained = (run_folder / "train").is_dir()
    own_run = run_folder if trained or again is not None else None
    own_head = trained and not any(re.search(r"\s--head[ =]", result.command) for result in results)
    past = read_history(run_folder) if own_head else None
    for name, mark in REPORT_MARKS.items():
        check_ours("report", folder / name, mark)
    check_decision("report", folder)
    with writing:
        how: dict[str, Any] = {"export": export, "price_per_hour": price, "history": past, "run": own_run}
        decision = plan_stage(results, table, folder, again=again, one_run=again is not None, **how)
        write_report(results, folder, decision, past)
    put(folder / "report.html")
    return gate.judge(paths)


def compare(own: Namespace, words: list[str]) -> int:
    """Say what changed from one result to another."""
    options = [word for word in words if word.startswith("-")]
    if options or len(words) != 2:
        wrong = f"there is no option {options[0]}" if options else f"{len(words)} files are named"
        raise UserError(
            f"compare takes two files or folders, OLD NEW, but {wrong}: `draftsmith compare --help` shows the options."
        )
    pairs, left_out = result_pairs(*(Path(word) for word in words))
    if own.output is not None:
        if own.output.exists() and any(own.output.samefile(path) for pair in pairs for path, _ in pair):
            raise UserError(f"--output {own.output} is one of the results: name another file.")
        check_file("--output", own.output, (".md", ".json"), COMPARISON_MARK)
    comparisons = [compare_results(a, b, (str(old), str(new)), own.drafter) for (old, a), (new, b) in pairs]
    comparisons[0] = replace(comparisons[0], notes=(*left_out, *comparisons[0].notes))
    for one in comparisons if own.fail_if_worse else ():
        one.require_intervals()
    if own.output is not None and own.output.suffix == ".json":
        kept = [asdict(one) for one in comparisons]
        write_json(own.output, kept if len(kept) > 1 else kept[0])
    elif own.output is not None:
        write_text(own.output, "\n".join(map(comparison_markdown, comparisons)))
    for one in comparisons:
        Console().print(comparison_text(one))
    if own.output is not None:
        put(own.output)
    worse = [sentence for one in comparisons if own.fail_if_worse for sentence in one.worse]
    for sentence in worse:
        tell(sentence)
    return MISSED if worse else 0


def import_native(own: Namespace, words: list[str]) -> int:
    """Take the target's own MTP layer as a head."""
    put(import_layer(session_of("import", words, []), own.output))
    return 0


def inspect(own: Namespace, words: list[str]) -> int:
    """Show what is learned from."""
    session, console = session_of("inspect", words, own.redo), Console()
    recipe = session.recipe
    look_at(
        session,
        session.conversations,
        learned=not recipe.answers.regenerate,
        on_refused=recipe.data.on_refused,
    )
    for sample in samples_at_hand(session, own.count):
        show_conversation(sample, session.tokenizer, console)
    return 0


def recipes(own: Namespace, words: list[str]) -> int:
    """List what is installed, or print or copy what is named."""
    if len(words) > 1 or (words and words[0].startswith("-")):
        raise UserError(f"recipes takes one name, and --output, but {' '.join(words)!r} is named.")
    if not words and own.output is not None:
        raise UserError(
            "--output is for one recipe: name it, as in `draftsmith recipes eagle3/tiny --output mine.yaml`."
        )
    if not words:
        known = shipped_names()
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {about}" for name, about in known.items()))
        return 0
    recipe = shipped_text(words[0])
    if own.output is None:
        print(recipe, end="")
        return 0
    check_file("--output", own.output, (".yaml", ".yml"))
    if own.output.exists():
        raise UserError(f"--output {own.output} is there: name a new file.")
    write_text(own.output, recipe)
    print(own.output)
    return 0


def plan(own: Namespace, words: list[str]) -> int:
    """Say what a recipe needs."""
    device = None if own.device in (None, "cpu") else find_device(own.device)
    recipe = _recipe("plan", words, "eagle3/qwen3-8b")
    asked = {"gpus": own.gpus, "utilisation": own.utilisation, "prompt": own.prompt_tokens, "answer": own.answer_tokens}
    device = device or device_here(choose_device(own.device or recipe.target.device))
    estimator = Estimator.of(recipe, device, {key: value for key, value in asked.items() if value is not None})
    estimate = estimator.estimate(recipe)
    if own.comment:
        put(estimating.comment(estimate))
        return 0
    lines = [*estimating.describe(estimate), *estimating.engines(recipe, estimator.target)]
    lines += [*estimating.guesses(estimate, estimator.asked), *estimating.shorter(estimate, estimator.estimate)]
    lines += estimating.foresee(estimate, own.pilot)
    put("\n".join([f"plan of {recipe.name}", *lines]))
    if recipe.train.warm_start:
        put("head: sizes that the recipe leaves null count as the target's; those of train.warm_start are not read")
    return 0


def session_of(name: str, words: list[str], redo: list[str], head: Path | None = None, made: str = "") -> Session:
    """Return the session of a command's recipe. made: the command by the stages that it makes, its name if left out."""
    recipe = _recipe(name, words)
    check_redo(redo, made or name, recipe)
    if name == "export" and recipe.target.shared:  # which passes nothing through the target, so that it need fit no GPU
        recipe = replace(recipe, target=replace(recipe.target, tensor_parallel=1, device="cpu"))
    return Session(recipe, redo=set(redo), head=head, words=words, training=name == "train")


def _recipe(name: str, words: list[str], example: str = "eagle3/tiny") -> Recipe:
    require_recipe(words, name, example)
    return parse_recipe(words, f"draftsmith {name}", COMMANDS[name].help, COMMANDS[name].options)


def _show(results: list[Path]) -> None:
    """Print the headline table of result files."""
    Console().print(headline_table([read_result(path) for path in results]))
