"""What each dashboard is given, read back from what it has written."""

import json
import shutil
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import StoppedError
from draftsmith.eval.results.result import read_result
from draftsmith.recipe.schema import Backend, Recipe, TrackingSpec
from draftsmith.train.dashboards import Tracker, tell_offline, track_results

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "smollm2" / "eagle3" / "t0" / "result.json"
CONFIG = {"recipe": {"seed": 1, "head": {"layer_ids": [2, 4]}}, "versions": {"torch": "2"}, "commit": None}
FULL: dict[str, Any] = {"project": "trial", "name": "shown", "group": "night", "artifacts": "all"}


@dataclass
class Found:
    """What a dashboard holds: name -> step -> all values that were logged for it; the files, by name."""

    figures: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    summary: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    about: set[str] = field(default_factory=set)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def add(self, name: str, step: int, value: Any) -> None:
        self.figures[name][step].append(value)


def record(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl; every second one has an evaluation."""
    values: dict[str, Any] = {"step": step, "tokens": 100 * step, "loss": 4.0 / step, "step_loss": [1.5, 2.5]}
    if step % 2 == 0:
        values |= {"heldout_loss": 1.0, "tau": {"overall": 1.0 + step / 4, "slices": {"math": 3.0}}}
    return values


def play(run: Path, spec: TrackingSpec) -> Recipe:
    """Train four steps, interrupted after the third with a checkpoint at the second; then evaluate and export, and ask twice for the
    results to be given."""
    folder = run / "train"
    folder.mkdir(parents=True)
    with suppress(StoppedError), Tracker(folder, spec, "mini", CONFIG, 0) as tracker:
        for step in (1, 2, 3):
            tracker.log(record(step), {"memory_gib": step / 8})
        raise StoppedError("interrupted")
    with Tracker(folder, spec, "mini", CONFIG, 2) as tracker:
        for step in (3, 4):
            tracker.log(record(step), {"memory_gib": step / 8})
        tracker.summary({"best/tau": 2.0, "best/step": 4})
    (run / "evaluation" / "t0").mkdir(parents=True)
    (run / "export" / "flat").mkdir(parents=True)
    shutil.copy(MEASURED, run / "evaluation" / "t0")
    (run / "evaluation" / "report.html").write_text("a report")
    (run / "export" / "flat" / "model.safetensors").write_text("weights")
    recipe = Recipe(name="mini", output_dir=str(run), tracking=spec)
    for _ in range(2):
        track_results(recipe)
    return recipe


def read_wandb(run: Path) -> Found:
    """Read the one offline run that `wandb sync` would see, as soon as W&B's own process has written all of it."""
    (path,) = run.glob("train/wandb/offline-run-*/*.wandb")
    for _ in range(300):
        found = read_wandb_file(path)
        if "exit" in found.about:
            return found
        time.sleep(0.1)
    pytest.fail("W&B's process has not written the end of the run")


def read_wandb_file(path: Path) -> Found:
    """Read LevelDB's log of protobufs, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as protobuf

    found, data, at, part = Found(), path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            break  # W&B is writing it
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            message = protobuf.Record()
            message.ParseFromString(part)
            part = b""
            add_record(found, message, path.parent / "files")
    return found


def add_record(found: Found, message: Any, folder: Path) -> None:
    """Add one of W&B's records. folder: where it keeps tables."""
    kind = message.WhichOneof("record_type")
    if kind == "run":
        found.config = {item.key: json.loads(item.value_json) for item in message.run.config.update}
        found.about |= {message.run.project, message.run.display_name, message.run.run_group, message.run.notes}
        found.about |= {*message.run.tags, message.run.entity}
    elif kind == "history":
        values = {tuple(i.nested_key): json.loads(i.value_json) for i in message.history.item}
        for (name, *part), value in values.items():
            if part == ["path"]:
                table = json.loads((folder / value).read_text())
                found.tables[name] = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
            elif not part:
                found.add(name, values[("_step",)], value)
    elif kind == "summary":
        found.summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in message.summary.update}
    elif kind == "metric":
        name = message.metric.name or message.metric.glob_name
        found.about.add(f"{name} {message.metric.step_metric} {'max' if message.metric.summary.max else ''}".strip())
    elif kind == "exit":
        found.about.add(kind)
    elif kind == "artifact":
        found.files |= {f"{message.artifact.type}/{entry.path}" for entry in message.artifact.manifest.contents}


def read_tensorboard(run: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    found = Found()
    for folder in {path.parent for path in run.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                found.add(name, event.step, event.value)
        for name in events.Tags()["tensors"]:
            text = events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
            found.tables[name.removesuffix("/text_summary")] = read_markdown(text)
        for content in events.summary_metadata.values():
            if content.plugin_data.plugin_name == "hparams":
                data = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
                found.config |= {
                    name: value.number_value or value.string_value
                    for name, value in data.session_start_info.hparams.items()
                }
    found.summary = {name: values[max(values)][-1] for name, values in found.figures.items()}
    return found


def read_markdown(text: str) -> list[dict[str, Any]]:
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return [dict(zip(heads, row, strict=True)) for row in rows]


def read_trackio(run: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    assert (run / "train" / "trackio" / "trial.db").exists()
    found = Found()
    (kept,) = SQLiteStorage.get_run_records("trial")
    found.config = SQLiteStorage.get_run_config("trial", run_id=kept["id"]) or {}
    found.about = {kept["name"].rsplit("-", 1)[0], found.config["_Group"], "trial"}
    for entry in SQLiteStorage.get_logs("trial", run_id=kept["id"]):
        for name, value in entry.items():
            if isinstance(value, float | int) and name != "step":
                found.add(name, entry["step"], value)
            elif isinstance(value, dict):
                found.tables[name] = value["_value"]
    for artifact in SQLiteStorage.get_artifacts("trial"):
        spec = f"v{artifact['num_versions'] - 1}" if "num_versions" in artifact else None
        manifest = SQLiteStorage.get_artifact_manifest("trial", artifact["name"], spec or "latest")
        found.files |= {f"{artifact['type']}/{entry['path']}" for entry in manifest["manifest"]}
    found.summary = {name: values[max(values)][-1] for name, values in found.figures.items()}
    return found


def read_mlflow(run: Path) -> Found:
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(f"sqlite:///{run / 'train' / 'mlflow' / 'mlflow.db'}"), Found()
    (kept,) = client.search_runs([e.experiment_id for e in client.search_experiments() if e.name == "trial"])
    assert kept.info.status == "FINISHED"
    found.config, found.summary = kept.data.params, kept.data.metrics
    found.about = {kept.info.run_name, kept.data.tags["group"], kept.data.tags["mlflow.note.content"], "trial"}
    found.about |= {name for name, value in kept.data.tags.items() if value == "true"}
    for name in kept.data.metrics:
        for metric in client.get_metric_history(kept.info.run_id, name):
            found.add(name, metric.step, metric.value)
    root = run / "train" / "mlflow" / "artifacts" / kept.info.run_id / "artifacts"
    found.files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    lines = (root / "evaluation" / "slices.csv").read_text().splitlines()
    found.tables["evaluation/slices"] = [
        dict(zip(lines[0].split(","), row.split(","), strict=True)) for row in lines[1:]
    ]
    return found


@dataclass(frozen=True)
class Case:
    """A dashboard. takes: what it has a place for, of FULL and others. read: what it holds."""

    backend: Backend
    takes: Mapping[str, Any]
    read: Callable[[Path], Found]
    about: set[str]


CASES = (
    Case(
        "wandb",
        FULL | {"tags": ["eagle"], "notes": "a trial", "entity": "team"},
        read_wandb,
        {"trial", "shown", "night", "a trial", "eagle", "team", "train/* train/tokens", "heldout/tau train/tokens max"},
    ),
    Case("tensorboard", {}, read_tensorboard, set()),
    Case("trackio", FULL, read_trackio, {"trial", "shown", "night"}),
    Case(
        "mlflow",
        FULL | {"tags": ["eagle"], "notes": "a trial"},
        read_mlflow,
        {"trial", "shown", "night", "a trial", "eagle"},
    ),
)


@pytest.fixture
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the trackers' own variables name no place; W&B copies tables until they are sent."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.full
@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.backend)
def test_a_run_with_an_interruption_is_one_dashboard(
    case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = TrackingSpec(backends=[case.backend], **case.takes)
    recipe = play(tmp_path / "run", spec)
    assert capfd.readouterr().out == "", "standard output is for results"
    found = case.read(recipe.run_dir)
    lines = [json.loads(line) for line in (recipe.run_dir / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    expected = {f"train/{name}": {line["step"]: [line[name]] for line in lines} for name in ("tokens", "loss")}
    expected |= {f"train/step_loss/{i}": {line["step"]: [line["step_loss"][i]] for line in lines} for i in (0, 1)}
    expected |= {"train/memory_gib": {step: [step / 8] for step in (1, 2, 3, 4)}}
    expected |= {"heldout/tau": {2: [1.5], 4: [2.0]}, "heldout/loss": {2: [1.0], 4: [1.0]}}
    expected |= {"heldout/tau_by_slice/math": {2: [3.0], 4: [3.0]}}
    for name, steps in expected.items():
        assert {step: [pytest.approx(v, rel=1e-6) for v in values] for step, values in steps.items()} == dict(
            found.figures[name]
        )
    assert (found.summary["best/tau"], found.summary["best/step"]) == (2.0, 4)
    assert case.about <= found.about
    check_results(case, found)
    assert str(found.config).count("layer_ids") in (1, 2)


def check_results(case: Case, found: Found) -> None:
    result = read_result(MEASURED)
    slices = [m for drafter in result.drafters.values() for m in (drafter.overall, *drafter.slices.values())]
    assert [float(row["tau"]) for row in found.tables["evaluation/slices"]] == [m.tau for m in slices]
    name, drafter = next(iter(result.drafters.items()))
    assert found.summary[f"evaluation/{name}/t0/tau"] == pytest.approx(drafter.overall.tau)
    key, expected = f"{name}/t0/overall", [pytest.approx(a) for a in drafter.overall.acceptance_at or ()]
    if case.backend == "wandb":
        points = [row for row in found.tables["evaluation/acceptance_at_table"] if row["lineKey"] == key]
        assert [(row["step"], row["lineVal"]) for row in points] == list(enumerate(expected, 1))
    else:
        assert found.figures[f"evaluation/acceptance_at/{key}"] == {i: [a] for i, a in enumerate(expected, 1)}
    if "artifacts" in case.takes:
        kept = {
            "results/evaluation/t0/result.json",
            "results/evaluation/report.html",
            "head/export/flat/model.safetensors",
        }
        assert kept <= found.files


@pytest.mark.parametrize(
    ("spec", "runs", "told"),
    [
        (TrackingSpec(wandb="offline"), ("offline-run-1-a", "offline-run-2-a", "continued-run-0-a"), True),
        (TrackingSpec(backends=["wandb"]), ("offline-run-2-a",), True),
        (TrackingSpec(wandb="online"), ("offline-run-2-a",), False),
        (TrackingSpec(backends=["tensorboard"]), ("offline-run-2-a",), False),
        (TrackingSpec(wandb="offline"), (), False),
    ],
)
def test_a_closing_line_names_the_offline_folder_that_holds_all(
    spec: TrackingSpec, runs: tuple[str, ...], told: bool, tmp_path: Path
) -> None:
    recipe = Recipe(output_dir=str(tmp_path / "my run"), tracking=spec)
    for name in runs:
        (tmp_path / "my run" / "train" / "wandb" / name).mkdir(parents=True)
    folder = tmp_path / "my run" / "train" / "wandb" / "offline-run-2-a"
    line = f"W&B: offline, in {folder}; `wandb sync '{folder}'` sends it"
    assert tell_offline(recipe) == ([line] if told else [])
