"""GGUF headers: read as the gguf package reads them, and never more than one sentence for what is none."""

import random
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from draftsmith.errors import UserError
from draftsmith.foreign.weights import read_gguf
from tests.ggufs import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.full
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
