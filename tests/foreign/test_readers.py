"""The readers of foreign files: what they take is whole and plain, and everything else is one sentence."""

import json
import os
import random
import socket
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code, try_out
from draftsmith.foreign.text import (
    MOST_DEPTH,
    MOST_LEVELS,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
    read_lines,
    read_object,
    read_text,
    read_yaml,
)
from draftsmith.foreign.weights import BITS, read_gguf, read_header, read_index
from tests.bad_inputs.cases import check_sentence, nested
from tests.ggufs import write_gguf

pytestmark = pytest.mark.full

REMEDY = "mend it"
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def refused(read: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(*arguments)
    check_sentence(str(caught.value))
    assert str(caught.value).endswith(f"{REMEDY}.")
    return str(caught.value)


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "round").symlink_to("round")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    said = {
        name: refused(open_file, tmp_path / name, REMEDY)
        for name in ("pipe", "dangling", "round", "socket", "absent", "x" * 300, "a/b", "")
    }
    listening.close()
    assert "is a pipe, not a file" in said["pipe"]
    assert "a link to nowhere, which does not exist" in said["dangling"]
    assert "its links go round" in said["round"]
    assert "socket" in said["socket"]
    assert "its name is too long" in said["x" * 300]
    assert "is a folder" in said[""]
    assert "NUL" in refused(open_file, "a\0b", REMEDY)
    assert "is a device" in refused(open_file, "/dev/zero", REMEDY)


def test_sizes_have_limits(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc\n" * 5)
    assert read_bytes(path, REMEDY, 20) == path.read_bytes()
    assert "20 bytes" in refused(read_bytes, path, REMEDY, 19)
    assert list(read_lines(path, REMEDY, 4)) == [b"abc\n"] * 5
    assert "line 1" in refused(lambda: list(read_lines(path, REMEDY, 3)))
    with path.open("ab") as file:
        file.truncate(10**12)  # sparse: it takes no room, and must not be read
    refused(read_bytes, path, REMEDY)


def test_text_is_utf8_with_a_mark_or_without(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    assert read_text(path, REMEDY) == "café"
    path.write_bytes("café".encode("latin-1"))
    assert "not UTF-8 text (unexpected end of data at byte 3)" in refused(read_text, path, REMEDY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{'a': 1}", "at column 2"),
        ('{"a": 1}\n{', "line 2"),
        (nested(MOST_DEPTH + 1), "nested deeper than 100 levels"),
        (nested(200_000), "nested deeper"),
        ('{"a":' * 200_000, "nested deeper"),
        ("9" * 41, "more than 40 digits"),
        ("9" * 5000, "more than 40 digits"),
        ("-" + "9" * 41, "more than 40 digits"),
        ("[1e999]", "the number inf"),
        ("[-Infinity]", "the number -inf"),
        ("[NaN]", "the number nan"),
        ('["\\ud800"]', "half a surrogate pair"),
        ('{"\\udfff": 1}', "half a surrogate pair"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_json_that_is_refused(text: str | bytes, words: str) -> None:
    assert words in refused(parse_json, text, "file", REMEDY)


def test_json_that_is_taken(tmp_path: Path) -> None:
    assert parse_json(nested(MOST_DEPTH), "file", REMEDY)
    assert parse_json('"\\ud83d\\ude00"', "file", REMEDY) == "😀"
    assert parse_json("[1e300, 1e-999]", "file", REMEDY) == [1e300, 0.0]
    assert parse_json("1000000000000000019884624838656", "file", REMEDY) > 10**30
    assert parse_json("[Infinity]", "file", REMEDY, infinite=True) == [float("inf")]
    (tmp_path / "a").write_text('{"a": 1}\n\n')
    assert "line 2: the line is empty" in refused(lambda: list(read_json_lines(tmp_path / "a", REMEDY)))
    (tmp_path / "a").write_text("[]")
    assert "no JSON object but a list" in str(refused(read_object, tmp_path / "a", REMEDY))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@FUZZ
@given(VALUES)
def test_any_value_is_taken_as_it_is_or_refused(value: Any) -> None:
    text = json.dumps(value)
    try:
        found = parse_json(text, "file", REMEDY)
    except UserError as error:
        check_sentence(str(error))
    else:
        assert json.dumps(found) == text
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


BYTES = {
    "json": st.binary(max_size=200) | st.text('{}[]",:0123456789eE+-.\\udtrufalsn \n').map(str.encode),
    "yaml": st.binary(max_size=300) | st.text("ab:&*!<>|?-[]{}#,'\"%@ \n\t0123456789", max_size=80).map(str.encode),
}


@pytest.mark.parametrize("kind", BYTES)
def test_any_bytes_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    @FUZZ
    @given(BYTES[kind])
    def check(data: bytes) -> None:
        (tmp_path / "file").write_bytes(data)
        try:
            (read_json if kind == "json" else read_yaml)(tmp_path / "file", REMEDY)
        except UserError as error:
            check_sentence(str(error))

    check()


def test_yaml_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {a: 1}\nother:\n  <<: *base\n  b: *base\n")
    assert read_yaml(path, REMEDY)["other"] == {"a": 1, "b": {"a": 1}}
    path.write_text("a: " + "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1))
    assert "nested deeper" in refused(read_yaml, path, REMEDY)
    path.write_text("a: &a [*a]\n")
    assert "line 1: the value named by an anchor contains itself" in refused(read_yaml, path, REMEDY)
    path.write_text("a: 1\nb: 2\na: 3\n")
    assert "the key 'a' stands there twice, in lines 1 and 3" in refused(read_yaml, path, REMEDY)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    path.write_text("\n".join(lines + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]))
    assert "more than 10000 values" in refused(read_yaml, path, REMEDY)


def test_a_header_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(0, dtype=torch.int8)}
    save_file(tensors, tmp_path / "a", {"format": "pt"})
    found = {span.name: span for span in read_header(tmp_path / "a", REMEDY)}
    assert {name: (one.shape, one.size) for name, one in found.items()} == {
        "a": ((2, 3), 24),
        "b": ((4,), 8),
        "c": ((0,), 0),
    }


ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*BITS, "F13"]) | VALUES,
        "shape": st.lists(st.integers(-2, 5), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-2, 60), max_size=3) | VALUES,
    },
)


@FUZZ
@given(
    st.dictionaries(st.text(string.ascii_lowercase, max_size=3), ENTRIES | VALUES, max_size=4), st.binary(max_size=60)
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + data)
    try:
        spans = read_header(tmp_path / "a", REMEDY)
    except UserError as error:
        check_sentence(str(error))
    else:
        assert sum(span.size for span in spans) == len(data)


def test_an_index_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    (tmp_path / "a").touch()
    for name in ("../a", "/etc/passwd", "", ".", "..", "b", "a/../a", "a\\b"):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        assert "index.json" in refused(read_index, index, REMEDY)
    index.write_text(json.dumps({"weight_map": {"x": "a"}}))
    assert read_index(index, REMEDY) == {"x": "a"}


def test_other_peoples_code_ends_in_a_sentence() -> None:
    class Panic(BaseException):
        """As Rust code raises."""

    errors = (
        KeyError("x"),
        RecursionError(),
        MemoryError(),
        Panic("no model"),
        OSError(2, "gone"),
        ZeroDivisionError(),
    )
    for error in errors:

        def fail(error: BaseException = error) -> None:
            with foreign_code("The file a cannot be read", REMEDY):
                raise error

        refused(fail)
    with pytest.raises(KeyboardInterrupt), foreign_code("x", REMEDY):
        raise KeyboardInterrupt


def test_what_is_tried_out_leaves_no_trace() -> None:
    seen: list[int] = []
    assert try_out(lambda: seen.append(1)) is None
    assert not seen
    assert try_out(lambda: "a" * 10**11) == "it takes too much memory"
    assert try_out(lambda: 1 / 0) == "division by zero"
    assert "too long" in str(try_out(lambda: sum(1 for _ in iter(int, 1)), seconds=1))

    def endless() -> None:
        endless()

    assert try_out(endless) == "it calls itself without end"


@pytest.fixture(scope="module", name="file")
def _file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def more(metadata: dict, _: object) -> None:
        metadata |= {"a.switch": True, "a.list": [1, -2, 3], "a.reals": [0.5, 2.0], "a.text": "ümlaut"}

    write_gguf(path := tmp_path_factory.mktemp("gguf") / "tiny.gguf", change=more)
    return path


def test_it_reads_what_the_package_reads(file: Path) -> None:
    header, theirs = read_gguf(file, "x"), GGUFReader(file)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == {key: field.contents() for key, field in fields.items()}
    assert len(header.tensors) == len(theirs.tensors) == 30
    for span, tensor in zip(header.tensors, theirs.tensors, strict=True):
        assert (span.name, span.dtype) == (tensor.name, tensor.tensor_type.name)
        assert span.shape == tuple(tensor.shape.tolist())[::-1]
        assert (span.start, span.size) == (tensor.data_offset, tensor.n_bytes)
    assert {span.dtype for span in header.tensors} == {"F32", "F16", "BF16", "Q8_0", "Q4_1"}


def test_a_header_that_is_cut_anywhere_is_told(file: Path, tmp_path: Path) -> None:
    data, end = file.read_bytes(), max(span.start + span.size for span in read_gguf(file, "x").tensors)
    for length in (*range(60), *range(60, end, 997), end - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(UserError, match=r"cut\.gguf"):
            read_gguf(tmp_path / "cut.gguf", "fetch it again")


def test_a_damaged_byte_is_told_or_harmless(file: Path, tmp_path: Path) -> None:
    data, start, draw = file.read_bytes(), min(span.start for span in read_gguf(file, "x").tensors), random.Random(0)
    told = []
    for _ in range(1500):
        spoilt = bytearray(data)
        spoilt[draw.randrange(start)] = draw.randrange(256)
        (tmp_path / "spoilt.gguf").write_bytes(spoilt)
        try:
            found = read_gguf(tmp_path / "spoilt.gguf", "fetch it again")
        except UserError as error:
            told.append(str(error))
        else:
            assert all(span.start + span.size <= len(data) for span in found.tensors)
    assert len(told) > 100
    assert not any("\n" in text for text in told)


def test_the_package_may_be_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install .draftsmith\[gguf\]"):
        read_gguf(file, "x")
