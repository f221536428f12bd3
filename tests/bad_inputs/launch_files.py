"""Bad launch files of accelerate, and bad configurations of DeepSpeed that they name."""

import json
from pathlib import Path
from typing import Any

import yaml

from draftsmith.recipe.schema import TrainSpec
from draftsmith.train.parallel import deepspeed_config, launch_settings
from tests.bad_inputs.cases import Case, Table, damaged, nested, replace_by_folder, write

FILE, ZERO = "launch.yaml", "zero.json"


def _launch(folder: Path) -> dict[str, Any]:
    named = {"deepspeed_config_file": str(folder / ZERO)}
    return {"distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1, "deepspeed_config": named}


def make(folder: Path) -> None:
    """Write a good launch file, and the configuration that it names."""
    (folder / FILE).write_text(yaml.safe_dump(_launch(folder)), encoding="utf-8")
    (folder / ZERO).write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")


def read(folder: Path) -> None:
    """Read both as a launch does."""
    deepspeed_config(TrainSpec(), launch_settings(folder / FILE))


def launch(key: str, value: Any, *words: str) -> Case:
    """Return the case of a launch file with another value; the sentence names the key, and says the words."""

    def spoil(folder: Path) -> None:
        (folder / FILE).write_text(yaml.safe_dump(_launch(folder) | {key: value}), encoding="utf-8")

    return Case(f"{key}-{json.dumps(value, default=str)[:30]}", spoil, (key, *words))


def zero(name: str, **keys: Any) -> Case:
    """Return the case of a configuration of DeepSpeed with other values; the sentence names the file and the first key."""
    content = {"zero_optimization": {"stage": 2}} | keys
    return Case(f"zero-{name}", write(ZERO, json.dumps(content)), (ZERO, next(iter(keys))))


TABLE = Table(
    "launch-files",
    make,
    read,
    (
        *(
            Case(name, write(FILE, content), (FILE,))
            for name, content in (
                ("list", "[a]"),
                ("word", "hello"),
                ("tabs", "a:\n\tb: 1\n"),
                ("recursive", "&a [*a]"),
                ("deep", nested(5000)),
                ("key-twice", "distributed_type: NO\ndistributed_type: FSDP\n"),
                ("binary", b"\xff\xfe\x00"),
                ("python-object", "distributed_type: !!python/object/apply:os.system ['true']\n"),
                ("without-a-type", "num_processes: 2\n"),
                ("laughs", "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 10))),
            )
        ),
        Case("open-list", write(FILE, "a: ["), (FILE, "is not YAML")),
        Case("other-keys", write(FILE, "method: eagle3"), (FILE, "no launch file")),
        Case("nothing", write(FILE, ""), (FILE, "no launch file")),
        Case("file-folder", replace_by_folder(FILE), (FILE, "is a folder, not a file")),
        *damaged(FILE, without="folder long-integer half-surrogate cut null list empty word binary deep"),
        *(launch("distributed_type", value) for value in (None, ["NO"])),
        *(launch("num_processes", value) for value in (1.5, 10**12, None)),
        *(launch("num_processes", value, "it must be a number from 1") for value in ("many", 0, -1)),
        *(launch("num_machines", value) for value in ("x", [1])),
        launch("use_cpu", {"a": 1}),
        *(launch("fsdp_config", value, "it is a section") for value in ("x", [1], 3)),
        launch("deepspeed_config", 3),
        *damaged(ZERO, name="zero"),
        zero("stage-text", zero_optimization={"stage": "two"}),
        zero("stage-3", zero_optimization={"stage": 3}),
        zero("section-a-number", zero_optimization=2),
        zero("section-null", zero_optimization=None),
        zero("optimizer-a-text", optimizer="adam"),
        zero("fp16-a-list", fp16=[True]),
        zero("clipping", gradient_clipping=[1]),
    ),
)
