"""tightwire.conformance with decoders that are right and decoders that are not."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tightwire import conformance

SPECS = Path(__file__).resolve().parents[2] / "specs"
CHOSEN = ("raw/uint8_3", "zipccl/bfloat16_640", "invalid/magic", "invalid/padding_sign")
PYTHON = shlex.quote(sys.executable)
DECODER = f"{PYTHON} {shlex.quote(str(SPECS / 'decoder.py'))} {{in}} {{out}}"


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"
    for name in CHOSEN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for path in (SPECS / "vectors").glob(f"{name}.*"):
            shutil.copy(path, folder / path.relative_to(SPECS / "vectors"))
    shutil.copy(SPECS / "vectors" / "invalid" / "reasons.json", folder / "invalid")
    return folder


def script(tmp_path: Path, source: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(f"import pathlib, sys, time\n{source}\n")
    return f"{PYTHON} {shlex.quote(str(path))} --from={{in}} {{out}}"


def details(command: str, vectors: Path, timeout: float = 60) -> dict[str, str]:
    results = conformance.run(command, vectors, timeout)
    assert [r.name for r in results] == sorted(CHOSEN)
    assert all(r.passed == (not r.detail) for r in results)
    return {r.name: r.detail for r in results if not r.passed}


def test_decoder_of_the_pages_passes(vectors: Path) -> None:
    assert details(DECODER, vectors) == {}


def test_wrong_bytes_and_acceptance_fail(vectors: Path, tmp_path: Path) -> None:
    found = details(script(tmp_path, "pathlib.Path(sys.argv[2]).write_bytes(b'1')"), vectors)
    assert found == {
        "raw/uint8_3": "wrote other bytes",
        "zipccl/bfloat16_640": "wrote other bytes",
        "invalid/magic": "accepted, expected bad_magic",
        "invalid/padding_sign": "accepted, expected bad_payload",
    }


def test_wrong_reason_and_refusal_fail(vectors: Path, tmp_path: Path) -> None:
    found = details(script(tmp_path, r"sys.exit('warning\nbad_magic: no\n\n')"), vectors)
    assert found == {
        "raw/uint8_3": "exit status 1: bad_magic: no",
        "zipccl/bfloat16_640": "exit status 1: bad_magic: no",
        "invalid/padding_sign": "gave 'bad_magic: no', expected bad_payload",
    }


def test_silence_fails(vectors: Path, tmp_path: Path) -> None:
    assert set(details(script(tmp_path, "sys.exit(3)"), vectors)) == set(CHOSEN)
    found = details(script(tmp_path, ""), vectors)
    assert found["raw/uint8_3"] == "wrote no output"


def test_only_vectors_of_chosen_codecs(vectors: Path) -> None:
    def names(*codecs: str) -> list[str]:
        return [r.name for r in conformance.run(DECODER, vectors, codecs=codecs)]

    short = vectors / "invalid" / "short.tw"
    short.write_bytes((vectors / "invalid" / "magic.tw").read_bytes()[:6])
    unknown = vectors / "invalid" / "unknown.tw"
    unknown.write_bytes(b"TWIR" + bytes(2) + b"\xff\xff" + bytes(60))
    assert names("zipccl") == ["invalid/padding_sign", "zipccl/bfloat16_640"]
    assert names("raw") == ["invalid/magic", "raw/uint8_3"]
    assert names("raw", "zipccl") == sorted(CHOSEN)
    with pytest.raises(FileNotFoundError, match="no vectors of mx, thc in"):
        names("mx", "thc")
    with pytest.raises(ValueError, match=r"Unknown codec 'nope'\. Allowed: raw, zipccl"):
        names("nope")


def test_vectors_with_a_base(vectors: Path) -> None:
    name = "delta/bfloat16_100"
    (vectors / "delta").mkdir()
    for path in (SPECS / "vectors").glob(f"{name}.*"):
        shutil.copy(path, vectors / "delta")
    assert details(DECODER, vectors) == {}
    assert conformance.left_out(DECODER, vectors) == 1
    assert conformance.left_out(DECODER, vectors, ["raw", "delta"]) == 1
    assert conformance.left_out(DECODER, vectors, ["raw", "zipccl"]) == 0

    command = f"{DECODER} {{base}}"
    assert conformance.left_out(command, vectors) == 0
    results = conformance.run(command, vectors)
    assert [r.name for r in results] == sorted([*CHOSEN, name])
    assert all(r.passed for r in results)


def test_timeout_fails(vectors: Path, tmp_path: Path) -> None:
    found = details(script(tmp_path, "time.sleep(60)"), vectors, 0.2)
    assert found == dict.fromkeys(CHOSEN, "took more than 0.2 s")


@pytest.mark.parametrize("command", ["decode {in}", "decode {out}", "", "decode in out"])
def test_placeholder_missing(command: str, vectors: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \{(in|out)\}"):
        conformance.run(command, vectors)


def test_program_missing(vectors: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-decoder"):
        conformance.run("no-such-decoder {in} {out}", vectors)


def test_vectors_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no vectors"):
        conformance.run(DECODER, tmp_path)


def test_reason_missing(vectors: Path) -> None:
    (vectors / "invalid" / "reasons.json").unlink()
    with pytest.raises(ValueError, match="no reason for magic"):
        conformance.run(DECODER, vectors)


def test_default_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conformance.default_vectors() == SPECS / "vectors"
    monkeypatch.setattr(conformance, "__file__", str(tmp_path / "a" / "b" / "conformance.py"))
    with pytest.raises(FileNotFoundError, match="pass --vectors DIR"):
        conformance.default_vectors()
