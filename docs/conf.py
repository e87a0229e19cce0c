"""Sphinx: `sphinx-build -W --keep-going -n docs OUT`. Needs no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import tightwire
from tightwire import torch_ops

HERE = Path(__file__).resolve().parent
#: Folders that appear here by a link; Sphinx resolves links between their pages past the link.
LINKED = {(HERE / name).resolve(): name for name in ("format", "results")}
#: A character that no docstring has.
HIDDEN_COLON = "\ue000"

project = "tightwire"
author = "the tightwire authors"
copyright = author
version = release = tightwire.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
root_doc = "index"
# format and results are links to folders that also hold data and programs.
exclude_patterns = ["_build", "drawings", "format/vectors", "format/tables"]
nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
# As a list: the attributes have entries of their own where they have comments.
napoleon_use_ivar = True
# Not needed to read docstrings, and not installable everywhere.
autodoc_mock_imports = ["cupy", "mpi4py", "ucxx", "transformers"]
# A name between single backticks becomes a link where it is a public name.
default_role = "py:obj"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"tightwire {release}"
html_static_path = ["_static"]
html_css_files = ["tightwire.css"]
html_show_sphinx = False
html_copy_source = False


def _mend_links(app: Sphinx, doctree: nodes.document) -> None:
    """Links into linked folders lead to their pages, those to other Markdown files to a copy."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        target = Path(node["reftarget"])
        if not target.is_absolute():
            continue
        for folder, name in LINKED.items():
            if target.is_relative_to(folder):
                node["reftarget"] = f"{name}/{target.relative_to(folder).as_posix()}"
                break
        else:
            path = target.with_name(target.name + ".md")
            if path.is_file():
                copy = addnodes.download_reference("", "", refdoc=node["refdoc"])
                copy["reftarget"] = "/" + os.path.relpath(path, HERE)
                copy.extend(node.children)
                node.replace_self(copy)


def _resolve_names(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Node
) -> nodes.Node | None:
    """Links to public names by the name that users import; others stay plain text.

    A role that names a part of tightwire which is not there stays an error.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    public = f"tightwire.{target.rpartition('.')[2]}"
    if target != public and public.removeprefix("tightwire.") in tightwire.__all__:
        domain, page = env.domains.python_domain, node.get("refdoc", env.docname)
        link = domain.resolve_xref(env, page, app.builder, "obj", public, node, text)
        if link is not None:
            return link
    annotation = "refwarn" not in node
    foreign = not target.startswith(("tightwire.", "tw."))
    return text if annotation or node["reftype"] == "obj" or foreign else None


def _hide_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Napoleon takes what stands before a colon for the type of an attribute, as here it is not."""
    if lines and what in ("attribute", "property", "data"):
        lines[0] = lines[0].replace(":", HIDDEN_COLON)


def _show_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Put colons back; make an indented block behind a paragraph a block of code."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]
    for i in range(1, len(lines) - 1):
        before, after = lines[i - 1], lines[i + 1]
        starts = before and not before.startswith((" ", ":", "..", "-")) and not lines[i]
        if starts and after.startswith("    ") and not before.endswith("::"):
            lines[i - 1] = before.removesuffix(":") + "::"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    # Before the collector of downloads, which has the priority 500, as napoleon has.
    app.connect("doctree-read", _mend_links, priority=400)
    app.connect("missing-reference", _resolve_names)
    app.connect("autodoc-process-docstring", _hide_colons, priority=400)
    app.connect("autodoc-process-docstring", _show_colons, priority=600)
    # Custom operators have no docstring, the functions that they are made of have.
    for operator in ("encode_into", "decode_into"):
        setattr(torch_ops, operator, getattr(torch_ops, operator)._init_fn)
