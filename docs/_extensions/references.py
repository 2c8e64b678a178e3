"""Resolves a reference to an object by any name that it can be imported by.

Docstrings name the module that defines a class, and the API pages the one that it is imported from.
Tables of objects leave out the citations of a docstring's first line.
"""

from pydoc import locate
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autosummary import autosummary_table
from sphinx.util.nodes import make_refnode


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.reference | None:
    """Return a link to the entry of the object that ``node`` names, or None."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"]
    thing = locate(name)

    def is_named(documented: str) -> bool:
        if thing is None:
            return documented.endswith(f".{name}")
        # Importing every entry would take long.
        return documented.endswith(f".{name.split('.')[-1]}") and locate(documented) is thing

    entries = env.domains.python_domain.objects
    found = [documented for documented in entries if is_named(documented)]
    if len({id(locate(documented)) for documented in found}) != 1:
        return None
    entry = entries[found[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def leave_out_citations(app: Sphinx, document: nodes.document) -> None:
    for table in document.findall(autosummary_table):
        for citation in [n for n in table.findall(pending_xref) if n["refdomain"] == "citation"]:
            paragraph = citation.parent
            before = paragraph[paragraph.index(citation) - 1]
            paragraph.remove(citation)
            paragraph.replace(before, nodes.Text(before.astext().rstrip()))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("missing-reference", resolve)
    app.connect("doctree-read", leave_out_citations)
    return {"parallel_read_safe": True}
