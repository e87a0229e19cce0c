"""Nested dicts, lists and plain values around tensors, as JSON (specs/container.md, "Trees")."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from .formats.container import MAX_TREE, METADATA, check_text, unique_members
from .formats.errors import FormatError

MAX_DEPTH = 64
_SCALARS = (str, int, float, bool, type(None))
_KINDS = ("tensor", "dict", "tuple", "bytes", "float")


def is_array(value: Any) -> bool:
    """False for the nodes of a tree; anything else has to be an array."""
    return not isinstance(value, (Mapping, list, tuple, bytes)) and type(value) not in _SCALARS


def flatten(value: Any) -> tuple[dict[str, Any], str]:
    """The arrays in nested dicts, lists and tuples, by name, and the tree around them as JSON.

    Names are paths: keys and positions with dots between. Raises TypeError or ValueError for keys
    and values that a tree cannot hold.
    """
    arrays: dict[str, Any] = {}
    text = json.dumps(_node(value, (), arrays), separators=(",", ":"), ensure_ascii=False)
    if len(text) > MAX_TREE:
        raise ValueError(
            f"the tree around the tensors has {len(text)} characters; allowed: {MAX_TREE}"
        )
    return arrays, text


def _node(value: Any, path: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep at {'.'.join(path[:4])}...")
    if isinstance(value, Mapping):
        members = []
        for key, item in value.items():
            if type(key) not in _SCALARS or (type(key) is float and not math.isfinite(key)):
                raise TypeError(
                    f"key {key!r} at {'.'.join(path)!r}; allowed: text, numbers, booleans, None"
                )
            if isinstance(key, str):
                check_text(key)
            members.append([key, _node(item, (*path, str(key)), arrays)])
        return {"dict": members}
    if isinstance(value, (list, tuple)):
        items = [_node(item, (*path, str(i)), arrays) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if type(value) in _SCALARS:
        if isinstance(value, str):
            check_text(value)
        return value
    name = ".".join(path)
    while name in arrays or name == METADATA:
        name += "+"
    arrays[name] = value
    return {"tensor": name}


def read_tree(text: str, names: Any) -> Any:
    """The JSON of a tree over tensors of these names, checked.

    Raises FormatError("bad_container").
    """
    try:
        if len(text) > MAX_TREE:
            raise ValueError(f"{len(text)} characters; allowed: {MAX_TREE}")
        tree = _JSON.decode(text)
        build(tree, dict.fromkeys(names))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError("bad_container", f"bad tree: {error}") from None
    return tree


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_JSON = json.JSONDecoder(object_pairs_hook=unique_members, parse_constant=_no_constant)


def build(tree: Any, tensors: Mapping[str, Any], depth: int = 0) -> Any:
    """What `flatten` took apart, with `tensors` in their places. ValueError for a bad tree."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if type(tree) in _SCALARS:
        if isinstance(tree, str):
            check_text(tree)
        if isinstance(tree, float) and not math.isfinite(tree):
            raise ValueError("a number is too large")
        return tree
    if isinstance(tree, list):
        return [build(item, tensors, depth + 1) for item in tree]
    if len(tree) != 1:
        raise ValueError(f"a node has {len(tree)} members")
    ((kind, inner),) = tree.items()
    if kind == "tensor" and isinstance(inner, str):
        if inner not in tensors:
            raise ValueError(f"there is no tensor {inner!r}")
        return tensors[inner]
    if kind == "tuple" and isinstance(inner, list):
        return tuple(build(item, tensors, depth + 1) for item in inner)
    if kind == "bytes" and isinstance(inner, str):
        return base64.b64decode(inner, validate=True)
    if kind == "float" and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == "dict" and isinstance(inner, list):
        members: dict[Any, Any] = {}
        for pair in inner:
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in _SCALARS:
                raise ValueError("a member of a dict is not a key and a value")
            build(pair[0], tensors, depth + 1)
            if pair[0] in members:
                raise ValueError(f"key {pair[0]!r} occurs twice")
            members[pair[0]] = build(pair[1], tensors, depth + 1)
        return members
    raise ValueError(f"unknown node {kind!r}; allowed: {', '.join(_KINDS)}")
