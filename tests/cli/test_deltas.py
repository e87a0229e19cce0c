"""Files of deltas: compress --delta-from, decompress of chains, what diff and bench say of them."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

import tightwire as tw
from tightwire import bench, convert
from tightwire.commands.advise import HUFFMAN_CPU, HUFFMAN_H200, HUFFMAN_H200_US
from tightwire.commands.app import app
from tightwire.contents import Contents, read_header
from tightwire.file_tensors import FileTensors, file_tensors
from tightwire.formats.container import BASE_KEY, MAX_DELTAS, base_note
from tightwire.storage import reading

safetensors = pytest.importorskip("safetensors.numpy")

N = 40_000


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: object) -> str:
    result = call(*words)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Five versions: w changes a little in each, v wholly in the last, where n is new."""
    rng = np.random.default_rng(0)
    tensors = {
        "w": rng.normal(0, 0.02, N).astype(ml_dtypes.bfloat16),
        "v": rng.normal(0, 0.02, N).astype(np.float32),
        "ids": np.arange(2000),
        "tiny": np.ones(3, np.float32),
    }
    paths = []
    for i in range(5):
        if i == 4:
            tensors["v"] = rng.normal(0, 0.02, N).astype(np.float32)
            tensors["n"] = rng.normal(0, 0.02, N).astype(np.float32)
        paths.append(tmp_path / f"s{i}.safetensors")
        safetensors.save_file(tensors, paths[-1])
        bits = tensors["w"].view(np.int16).copy()
        bits[rng.integers(0, N, N // 100)] += 1
        tensors["w"] = bits.view(ml_dtypes.bfloat16)
    return paths


def packed(path: Path) -> Path:
    return path.with_suffix(".tw.safetensors")


def chain(steps: list[Path], *words: object) -> None:
    done("compress", steps[0])
    for old, new in itertools.pairwise(steps):
        done("compress", new, "--delta-from", packed(old), *words)


def codecs(path: Path) -> dict[str, str]:
    _, infos = convert.inspect_file(path)
    return {name: info.as_dict().get("codec") or "plain" for name, info in infos.items()}


def test_a_chain_comes_back(steps: list[Path], tmp_path: Path) -> None:
    chain(steps)
    for i, path in enumerate(steps):
        back = tmp_path / "back.safetensors"
        done("decompress", packed(path), "-o", back)
        assert back.read_bytes() == path.read_bytes()
        back.unlink()
        done("verify", packed(path))
        assert "identical" in done("diff", path, packed(path))
        note = base_note(read_header(packed(path)))
        assert note == (None if i == 0 else (packed(steps[i - 1]).name, i))
    assert codecs(packed(steps[3])) == {"w": "delta", "v": "delta", "ids": "delta", "tiny": "plain"}
    assert packed(steps[3]).stat().st_size < 0.02 * steps[3].stat().st_size
    # What has no base, or shares nothing with it, is coded alone.
    last = codecs(packed(steps[4]))
    assert (last["w"], last["v"], last["n"]) == ("delta", "zipccl", "zipccl")


def test_the_limit_of_a_chain(steps: list[Path], tmp_path: Path) -> None:
    chain(steps, "--chain-limit", 2)
    notes = [base_note(read_header(packed(path))) for path in steps]
    assert [0 if note is None else note.deltas for note in notes] == [0, 1, 2, 0, 1]
    done("decompress", packed(steps[3]), "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == steps[3].read_bytes()
    for bad in (0, MAX_DELTAS + 1):
        assert call("compress", steps[0], "--chain-limit", bad).exit_code == 2
        with pytest.raises(ValueError, match="chain_limit"):
            convert.compress_file(steps[0], tmp_path / "x", chain_limit=bad)


def test_a_base_that_is_not_compressed(steps: list[Path], tmp_path: Path) -> None:
    out = done("compress", steps[1], "--delta-from", steps[0], "--codec", "huffman")
    assert "as deltas against" in out
    assert base_note(read_header(packed(steps[1]))) == (steps[0].name, 1)
    done("decompress", packed(steps[1]), "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == steps[1].read_bytes()


def test_inspect_names_the_base(steps: list[Path]) -> None:
    chain(steps[:3])
    wanted = [None, {"file": "s0.tw.safetensors", "deltas": 1}]
    wanted += [{"file": "s1.tw.safetensors", "deltas": 2}]
    for path, base in zip(steps, wanted, strict=False):
        (document,) = json.loads(done("inspect", packed(path), "--json"))["files"]
        assert document["base"] == base
    assert done("inspect", packed(steps[0])).endswith("gives its source back byte for byte\n")
    given = "byte for byte, given s0.tw.safetensors, which it holds deltas against\n"
    assert done("inspect", packed(steps[1])).endswith(given)
    assert done("inspect", packed(steps[2])).endswith("against, 2 files of deltas in a row\n")


def test_json_counts_deltas(steps: list[Path]) -> None:
    document = json.loads(done("compress", steps[1], "--delta-from", steps[0], "--json"))
    (file,) = document["files"]
    assert file["deltas"] == 3
    assert sum(tensor["codec"] == "delta" for tensor in file["tensors"]) == 3


def test_a_truncated_chain(steps: list[Path], tmp_path: Path) -> None:
    chain(steps)
    gone = packed(steps[1]).rename(tmp_path / "elsewhere")
    result = call("decompress", packed(steps[3]), "-o", tmp_path / "back")
    assert result.exit_code == 4
    assert packed(steps[1]).name in result.stderr
    assert "holds deltas against it" in result.stderr
    assert not (tmp_path / "back").exists()
    assert call("verify", packed(steps[3])).exit_code == 4
    # The base of a file itself may be elsewhere.
    done("decompress", packed(steps[2]), "--base", gone, "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == steps[2].read_bytes()


def test_a_base_that_is_cut_short_is_named_once(steps: list[Path], tmp_path: Path) -> None:
    done("compress", steps[0])
    short = tmp_path / "short.tw.safetensors"
    short.write_bytes(packed(steps[0]).read_bytes()[:-100])
    result = call("compress", steps[1], "--delta-from", short)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"tightwire: bad_container: {short}: the file has ")


def test_a_wrong_base(steps: list[Path], tmp_path: Path) -> None:
    chain(steps)
    back = tmp_path / "back"
    result = call("decompress", packed(steps[2]), "--base", steps[0], "-o", back)
    assert (result.exit_code, back.exists()) == (3, False)
    assert "base_mismatch" in result.stderr
    # Of other tensors.
    for tensors in ({"w": np.ones(N, np.float32)}, {"x": np.ones(N, np.float32)}):
        other = tmp_path / "other.safetensors"
        safetensors.save_file(tensors, other)
        result = call("decompress", packed(steps[2]), "--base", other, "-o", back)
        assert (result.exit_code, back.exists()) == (3, False)
        assert "base_mismatch" in result.stderr
        # The file itself is complete.
        assert "(needed: --base with what the deltas were made against)" in result.stderr
        assert "complete file" not in result.stderr
    # A file that takes none.
    result = call("decompress", packed(steps[0]), "--base", steps[0], "-o", back)
    assert "no deltas" in result.stderr
    assert result.exit_code != 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"file":"a"}',
        '{"file":"a","deltas":0}',
        '{"file":"a","deltas":257}',
        '{"file":"a","deltas":true}',
        '{"file":"../a","deltas":1}',
        '{"file":"a\\\\b","deltas":1}',
        '{"file":"..","deltas":1}',
        '{"file":"","deltas":1}',
        '{"file":1,"deltas":1}',
        '{"file":"a","deltas":1,"more":1}',
    ],
)
def test_bad_notes(steps: list[Path], tmp_path: Path, text: str) -> None:
    done("compress", steps[0])
    with reading(packed(steps[0])) as reader:
        directory = Contents(reader).directory
        directory = replace(directory, metadata={**directory.metadata, BASE_KEY: text})
        with pytest.raises(tw.FormatError, match=r"tightwire\.base") as caught:
            base_note(directory)
    assert caught.value.reason == "bad_container"


def test_a_file_that_is_its_own_base(steps: list[Path]) -> None:
    done("compress", steps[0])
    done("compress", steps[1], "--delta-from", packed(steps[0]))
    packed(steps[1]).rename(packed(steps[0]))
    with (
        pytest.raises(tw.FormatError, match="files of deltas") as caught,
        file_tensors(packed(steps[0]), 1 << 40),
    ):
        pass
    assert caught.value.reason == "bad_container"


def test_what_reads_files_says_that_a_base_is_needed(steps: list[Path]) -> None:
    done("compress", steps[1], "--delta-from", steps[0])
    with pytest.raises(ValueError, match="codes against a base"):
        tw.load_file(packed(steps[1]))
    with pytest.raises(ValueError, match="codes against a base"):
        tw.save_file({"a": np.arange(9000)}, io.BytesIO(), "delta")
    with pytest.raises(ValueError, match="Needed: base"):
        convert.decompress_file(io.BytesIO(packed(steps[1]).read_bytes()), io.BytesIO())


def test_misuse(steps: list[Path], tmp_path: Path) -> None:
    for words in (
        ("compress", steps[0], steps[1], "--delta-from", steps[0]),
        ("compress", tmp_path, "--delta-from", steps[0]),
        ("compress", steps[1], "--delta-from", tmp_path),
        ("compress", steps[1], "--delta-from", "-"),
        ("decompress", steps[0], steps[1], "--base", steps[0]),
    ):
        result = call(*words)
        assert result.exit_code == 2, words
    assert call("compress", steps[1], "--delta-from", tmp_path / "none").exit_code == 4


def test_what_a_delta_would_cost(steps: list[Path]) -> None:
    for old, new in (steps[:2], steps[3:]):
        result = call("diff", old, new)
        assert result.exit_code == 1
        assert f"{new} against {old} (compress --delta-from): " in result.stdout
        document = json.loads(call("diff", old, new, "--json").stdout)
        reports = {r.name: r for r in convert.compress_file(new, io.BytesIO(), base=old)}
        assert document["delta_nbytes"] == sum(r.packed_nbytes for r in reports.values())
        assert document["nbytes"] == sum(r.raw_nbytes for r in reports.values())
        both = [d for d in document["differences"] if d["n_elements"] is not None]
        assert both
        for found in both:
            report = reports[found["name"]]
            assert (found["delta_nbytes"], found["nbytes"]) == (
                report.packed_nbytes,
                report.raw_nbytes,
            )


def test_what_is_stored_plain_costs_its_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"s{i}.safetensors" for i in range(2)]
    for i, path in enumerate(paths):
        safetensors.save_file({"step": np.array(i)}, path)
    assert "step: 1 of 1 elements differ; takes 8 B of 8 B\n" in call("diff", *paths).stdout


@pytest.mark.slow
def test_bench_of_deltas(steps: list[Path]) -> None:
    report = bench.bench_file(steps[4], base=steps[3], repeat=1, threads=1)
    names = [speed.name for speed in report.speeds]
    assert names[:3] == ["memcpy", "delta", "huffman of XOR"]
    assert all(name.endswith("of XOR") for name in names[2:])
    assert all(speed.identical for speed in report.speeds)
    chain(steps[:4])
    again = bench.bench_file(steps[4], base=packed(steps[3]), repeat=1, threads=1)
    assert [s.ratio for s in again.speeds] == [s.ratio for s in report.speeds]
    out = done("bench", steps[1], "--delta-from", steps[0], "--repeat", 1)
    assert "delta" in out


def test_bench_of_codec_delta(steps: list[Path]) -> None:
    result = call("bench", steps[1], "--codec", "delta")
    assert result.exit_code == 2
    assert "Needed: --delta-from" in result.stderr
    words = ["bench", steps[1], "--delta-from", steps[0], "--repeat", 1, "--json"]
    found = json.loads(done(*words, "--codec", "delta"))
    assert "delta" in {speed["name"] for speed in found["speeds"]}


def test_speeds_of_huffman_are_those_of_the_record() -> None:
    record = Path(__file__).parents[2] / "benchmarks/results/lossless.json"
    data = json.loads(record.read_text())["data"]
    for dtype, speeds in HUFFMAN_CPU.items():
        found = data[f"N(0, 0.02), {dtype}"]["speeds"]["huffman"]
        assert speeds == (round(found["encode_gbps"], 2), round(found["decode_gbps"], 2))


def test_speeds_of_huffman_on_a_gpu_are_those_of_the_record() -> None:
    record = Path(__file__).parents[2] / "benchmarks/results/entropy_gpu_h200.json"
    data = json.loads(record.read_text())
    assert "H200" in data["machine"]["gpu"]
    found = {}
    for case in data["cases"]:
        for timing in case["timings"]:
            if case["data"] == "gaussian" and not timing["checksum"]:
                key = case["dtype"], case["mib"], timing["how"], timing["op"]
                found[key] = timing
    for dtype, speeds in HUFFMAN_H200.items():
        rates = [found[dtype, 256, "cold", op]["GB/s"] for op in ("encode", "decode")]
        assert speeds == tuple(map(round, rates))
    times = [found["bfloat16", 2, "replay", op]["us"]["median"] for op in ("encode", "decode")]
    assert tuple(round(us, 1) for us in times) == HUFFMAN_H200_US


def test_advise_of_other_codecs() -> None:
    call_of = ["advise", "--link", "1GB/s", "--message", "64MiB", "--world", "4"]
    speeds = ["--encode", "3GB/s", "--decode", "5GB/s"]
    document = json.loads(done(*call_of, "--json", "--codec", "huffman", *speeds))
    assert (document["codec"], document["ratio"]) == ("huffman", pytest.approx(0.662))
    out = done(*call_of, "--codec", "huffman", *speeds)
    assert out.startswith("codec: huffman, encode 3 GB/s, decode 5 GB/s\n")
    words = [*call_of, "--codec", "delta", *speeds, "--ratio", "0.01"]
    document = json.loads(done(*words, "--json"))
    assert (document["codec"], document["ratio"]) == ("delta", 0.01)
    document = json.loads(done(*call_of, "--json", *speeds))
    assert (document["codec"], document["ratio"]) == (None, pytest.approx(0.698))
    words = [*call_of, "--codec", "huffman"]
    assert done(*words).startswith("codec: huffman, speed recorded on one NVIDIA H200\n")
    document = json.loads(done(*words, "--json"))
    large = 256 << 20
    lines = [document[what] for what in ("encode", "decode")]
    gbps = [1e-9 * large / (line["alpha"] + line["beta"] * large) for line in lines]
    assert gbps == pytest.approx(HUFFMAN_H200["bfloat16"])
    # Recorded for floats alone; of integers the ratio is nobody's to know.
    words = [*call_of, "--codec", "huffman", "--device", "cpu"]
    assert done(*words).startswith("codec: huffman, speed recorded on one thread of a CPU\n")
    document = json.loads(done(*words, "--json"))
    gbps = [1e-9 / document[what]["beta"] for what in ("encode", "decode")]
    assert gbps == pytest.approx(HUFFMAN_CPU["bfloat16"])
    for more, message in (
        (["--codec", "huffman", "--dtype", "float64"], "speed of huffman for float64"),
        (["--codec", "huffman", "--device", "cpu", "--dtype", "int64"], "speed of huffman"),
        (["--codec", "huffman", *speeds, "--dtype", "int64"], "Needed: --ratio"),
        (["--codec", "huffman", *speeds, "--dtype", "bool"], "Needed: --ratio"),
        (["--codec", "delta", *speeds], "needs --ratio"),
        (["--codec", "delta", "--ratio", "0.01"], "Needed: --encode and --decode"),
    ):
        result = call(*call_of, *more)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


def test_no_base_is_overwritten(steps: list[Path], tmp_path: Path) -> None:
    chain(steps[:3])
    s0, s1, s2 = map(packed, steps[:3])
    before = {path: path.read_bytes() for path in (s0, s1, s2)}
    link = tmp_path / "link.tw.safetensors"
    link.symlink_to(s0)
    for words in (
        ("compress", steps[3], "-o", s2, "--delta-from", s2),
        ("compress", steps[3], "-o", s0, "--delta-from", s2),
        ("compress", steps[3], "-o", link, "--delta-from", s1),
        ("compress", "-", "-o", s0, "--delta-from", s1),
        ("decompress", s2, "-o", s0),
        ("decompress", s1, "-o", link),
        ("decompress", s1, "-o", s0, "--base", s0),
        ("decompress", "-", "-o", s0, "--base", s1),
    ):
        result = call(*words, "--force")
        assert (result.exit_code, "deltas are against" in result.stderr) == (2, True), words
        assert {path: path.read_bytes() for path in before} == before


def test_a_file_without_a_delta_names_no_base(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"s{i}.safetensors" for i in range(2)]
    for path in paths:
        safetensors.save_file({"w": rng.normal(size=N).astype(np.float32)}, path)
    done("compress", paths[1], "--delta-from", paths[0])
    assert codecs(packed(paths[1])) == {"w": "zipccl"}
    assert base_note(read_header(packed(paths[1]))) is None
    paths[0].unlink()
    done("decompress", packed(paths[1]), "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == paths[1].read_bytes()


def test_names_of_a_base_are_listed_once(steps: list[Path]) -> None:
    done("compress", steps[1], "--delta-from", steps[0])
    listed = []

    class Counted(FileTensors):
        @property
        def names(self) -> list[str]:
            listed.append(self.label)
            return super().names

    with file_tensors(packed(steps[1]), 1 << 40) as tensors, reading(steps[0]) as reader:
        tensors.base = Counted(reader, 1 << 40)
        for name in ("w", "v", "ids"):
            assert tensors.base_bits(name) is not None
    assert len(listed) == 1


def test_what_is_shorter_whole_is_stored_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = {"mask": rng.random(N) < 0.5, "count": rng.integers(0, 1 << 40, N)}
    new = {"mask": np.zeros(N, bool), "count": np.zeros(N, np.int64)}
    paths = [tmp_path / f"s{i}.safetensors" for i in range(2)]
    for tensors, path in zip((old, new), paths, strict=True):
        safetensors.save_file(tensors, path)
    alone = tmp_path / "alone"
    done("compress", paths[1], "--codec", "huffman", "-o", alone)
    done("compress", paths[1], "--codec", "huffman", "--delta-from", paths[0])
    assert packed(paths[1]).stat().st_size <= alone.stat().st_size
    # By zipccl, which stores integers as they are, the deltas are shorter.
    done("compress", paths[1], "--delta-from", paths[0], "--force")
    assert codecs(packed(paths[1])) == {"mask": "delta", "count": "delta"}


def test_verify_with_a_base_that_is_elsewhere(steps: list[Path], tmp_path: Path) -> None:
    chain(steps[:3])
    gone = packed(steps[1]).rename(tmp_path / "elsewhere")
    assert call("verify", packed(steps[2])).exit_code == 4
    assert "ok, 4 tensors" in done("verify", packed(steps[2]), "--base", gone)
    result = call("verify", packed(steps[2]), "--base", steps[0])
    assert (result.exit_code, "base_mismatch" in result.stderr) == (3, True)
    assert "(needed: --base with" in result.stderr
    assert "complete file" not in result.stderr
    assert call("verify", packed(steps[0]), "--base", steps[0]).exit_code == 5
    assert call("verify", packed(steps[0]), packed(steps[2]), "--base", gone).exit_code == 2


def test_verify_of_a_bare_delta(tmp_path: Path) -> None:
    x = np.arange(70_000, dtype=np.int32)
    y = x.copy()
    y[::50] += 1
    old, new, summed = (tmp_path / name for name in ("old.tw", "new.tw", "summed.tw"))
    old.write_bytes(bytes(tw.encode(x)))
    data = bytearray(bytes(tw.encode(y, "delta", base=x, checksum=False)))
    new.write_bytes(data)
    summed.write_bytes(bytes(tw.encode(y, "delta", base=x)))
    assert done("verify", new, "--base", old) == f"{new}: ok, 1 tensor\n"
    assert done("verify", summed, "--base", old) == f"{summed}: ok, 1 tensor\n"
    # Without the base.
    assert "not decoded" in done("verify", summed)
    (file,) = json.loads(done("verify", summed, "--json"))["files"]
    assert (file["tensors"], file["decoded"]) == (1, False)
    result = call("verify", new)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tightwire: {new}: is a delta without a checksum")
    # Damaged; another base; none that it could be.
    data[-200:-128] = bytes(byte ^ 255 for byte in data[-200:-128])
    new.write_bytes(data)
    assert call("verify", new, "--base", old).exit_code == 3
    old.write_bytes(bytes(tw.encode(y, "huffman")))
    assert "base_mismatch" in call("verify", summed, "--base", old).stderr
    assert call("verify", summed, "--base", summed).exit_code == 5
    assert call("verify", old, "--base", old).exit_code == 5
    assert call("verify", summed, "--base", __file__).exit_code == 2
    assert call("verify", summed, "--base", tmp_path / "none").exit_code == 4


def test_verify_of_a_bare_delta_of_a_small_tensor(tmp_path: Path) -> None:
    """It is stored by raw, and takes a base of its shape and dtype as others do."""
    old, new, other = (tmp_path / name for name in ("old.tw", "new.tw", "other.tw"))
    old.write_bytes(bytes(tw.encode(np.zeros(9, np.uint8))))
    new.write_bytes(bytes(tw.encode(np.ones(9, np.uint8), "delta", base=np.zeros(9, np.uint8))))
    other.write_bytes(bytes(tw.encode(np.zeros(8, np.uint8))))
    assert done("verify", new, "--base", old) == f"{new}: ok, 1 tensor\n"
    assert "needed: uint8[9]" in call("verify", new, "--base", other).stderr


def test_compress_says_why_there_are_no_deltas(steps: list[Path]) -> None:
    chain(steps[:3])
    words = "compress", steps[3], "--force", "--delta-from", packed(steps[2]), "--chain-limit"
    assert "3 of them as deltas against" in done(*words, 3)
    out = done(*words, 2)
    assert f"4 tensors, all whole as {packed(steps[2])} is number 2 of files of deltas" in out
    assert "--chain-limit 2" in out
