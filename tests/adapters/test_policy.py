"""Policies of process groups: which rule is for a call, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from tightwire.adapters.collectives.policy import DEFAULT_OPS, Policy, Rule
from tightwire.adapters.collectives.torch_backend import VARIABLE

MIB = 1 << 20


@pytest.mark.parametrize("op", DEFAULT_OPS)
def test_by_default_floats_are_compressed_losslessly_from_a_mebibyte_on(op: str) -> None:
    policy = Policy()
    assert policy.rules[0].codec == tw.codec("zipccl")
    assert policy.number(op, "bfloat16", MIB, "undefined") == 0
    assert policy.number(op, "bfloat16", MIB - 1, "undefined") is None
    assert policy.number(op, "int64", MIB, "undefined") is None


def test_the_first_rule_that_is_for_a_call_decides() -> None:
    policy = Policy(
        (
            Rule(codec=None, groups=("mesh_tp",), min_bytes=0),
            Rule("mx", ops=("all_reduce",), groups=("mesh_*",), dtypes=("bfloat16",)),
            Rule(min_bytes=100),
        )
    )
    assert policy.number("all_reduce", "bfloat16", MIB, "mesh_tp") is None
    assert policy.number("all_reduce", "bfloat16", MIB, "mesh_dp") == 1
    assert policy.number("all_reduce", "float32", MIB, "mesh_dp") == 2
    assert policy.number("all_gather", "bfloat16", MIB, "mesh_dp") == 2
    assert policy.number("all_reduce", "bfloat16", MIB - 1, "mesh_dp") == 2
    assert policy.number("all_reduce", "bfloat16", 99, "default_pg") is None
    assert Policy(()).number("all_reduce", "bfloat16", MIB, "") is None


def test_all_to_alls_with_splits_are_for_rules_that_name_them_whatever_their_size() -> None:
    # Ranks have inputs of different sizes there, and must decide alike.
    assert Policy().number("all_to_all_v", "bfloat16", MIB, "") is None
    named = Policy((Rule(ops=("all_to_all_v",)),))
    assert [named.number("all_to_all_v", "bfloat16", n, "") for n in (0, MIB)] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"codec": "mx"}, ValueError, "ops is empty, and mx loses data"),
        ({"wire": "bfloat16"}, ValueError, "ops is empty, and wire bfloat16 loses"),
        ({"wire": "bfloat16", "ops": ("all_gather",)}, ValueError, "allowed with wire"),
        ({"wire": "int8", "ops": ("all_reduce",)}, ValueError, "wire is 'int8'"),
        ({"ops": ("all_sum",)}, ValueError, "'all_sum'; allowed: .*'all_reduce'"),
        ({"ops": "all_reduce"}, TypeError, "ops is 'all_reduce'; allowed: a list"),
        ({"ops": (1,)}, TypeError, "an entry of ops is 1"),
        ({"dtypes": ("half",)}, ValueError, "'half'"),
        ({"groups": "*"}, TypeError, "groups is"),
        ({"min_bytes": -1}, ValueError, "min_bytes is -1"),
        ({"min_bytes": 1.5}, TypeError, "min_bytes"),
        ({"codec": "zip"}, ValueError, "zip"),
        ({"codec": 3}, TypeError, "codec is 3"),
        ({"algorithm": "fast"}, ValueError, "algorithm is 'fast'"),
        ({"topology": "star"}, ValueError, "topology is 'star'"),
        ({"topology": "ring"}, ValueError, "ring"),
        ({"codec": "tahquant", "ops": ("all_gather",)}, ValueError, "hidden|shape"),
    ],
)
def test_rules_that_make_no_sense_are_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Rule(**arguments)


@pytest.mark.parametrize("rules", ["zipccl", 3, ("zipccl",), None])
def test_a_policy_has_rules(rules: Any) -> None:
    with pytest.raises(TypeError, match="Rule"):
        Policy(rules)


def test_a_policy_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [
        {"codec": None, "groups": ["mesh_tp"]},
        {"codec": "mx", "params": {"element": "e2m1"}, "ops": ["all_reduce"], "min_bytes": 5},
        {},
    ]
    monkeypatch.setenv(VARIABLE, json.dumps(rules))
    expected = (
        Rule(None, groups=("mesh_tp",)),
        Rule(tw.codec("mx", element="e2m1"), ops=("all_reduce",), min_bytes=5),
        Rule(),
    )
    assert Policy.from_environment() == Policy(expected)
    # All ranks compare these texts.
    assert repr(Policy.from_environment()) == repr(Policy(expected))
    for text in ("", "lossless"):
        monkeypatch.setenv(VARIABLE, text)
        assert Policy.from_environment() == Policy()


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("zipccl", ValueError, "not JSON"),
        ("{}", TypeError, "allowed: a list of objects"),
        ('["zipccl"]', TypeError, "allowed: an object"),
        ('[{"size": 3}]', ValueError, r"a rule has \['size'\]; allowed: .*'min_bytes'"),
        ('[{"codec": "mx", "params": {"wide": 1}}]', TypeError, "wide"),
    ],
)
def test_texts_that_are_no_policy_are_refused(
    text: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Policy.parse(text)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lossless", ""])
def test_importing_torch_registers_the_backend_if_a_policy_is_set(
    policy: str, tmp_path: Path
) -> None:
    """As an installed package does, by its entry point."""
    pytest.importorskip("torch")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["torch.backends"].items()
    installed = tmp_path / "installed-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{' = '.join(entry)}\n")
    code = "import sys, torch.distributed as dist; print('tightwire' in dist.Backend.backend_list)"
    code += "; print(any('process_group' in name for name in sys.modules if 'tight' in name))"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, VARIABLE: policy}
    words = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == [str(bool(policy)), "False"], done.stderr


def test_a_rule_that_measures_may_keep_it() -> None:
    text = '[{"algorithm": "auto", "measurements": "times.tw"}]'
    (rule,) = Policy.parse(text).rules
    # A later change of the working directory changes nothing.
    assert rule.measurements == os.path.realpath("times.tw")
    for nothing in ("", "a\0b"):
        with pytest.raises(ValueError, match=r"measurements|null"):
            Rule(algorithm="auto", measurements=nothing)
    with pytest.raises(ValueError, match="allowed with it: 'auto'"):
        Rule(measurements="times.tw")
