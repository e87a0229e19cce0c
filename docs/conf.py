"""Sphinx: `sphinx-build -W --keep-going -n docs OUT`. Needs no network."""

import os
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import tightwire

HERE = Path(__file__).resolve().parent
#: Folders that appear here by a link; Sphinx resolves links between their pages past the link.
LINKED = {(HERE / name).resolve(): name for name in ("format", "results")}

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

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"tightwire {release}"
html_static_path = ["_static"]
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    # Before the collector of downloads, which has the priority 500.
    app.connect("doctree-read", _mend_links, priority=400)
