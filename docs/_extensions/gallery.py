"""Fills the page ``gallery`` from the scripts in docs/examples.

A script's docstring gives the heading, its first line, and the text; docs/images/<script>.png is
its picture if there is one.
"""

import ast
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ENTRY = """
## {title}

{picture}

{text}

<details><summary>Source of {path.name}</summary>

```{{literalinclude}} examples/{path.name}
```

</details>
"""


def add_entries(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append an entry for each script to the source of the page."""
    if docname != "gallery":
        return
    docs = Path(app.srcdir)
    for path in sorted(docs.glob("examples/*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if docstring is None:
            raise ValueError(f"{path} has no docstring to make its entry of. Write one.")
        title, _, text = docstring.partition("\n")
        title = title.removesuffix(".")
        picture = docs / "images" / f"{path.stem}.png"
        shown = f"![{title}](images/{picture.name})" if picture.exists() else ""
        source[0] += ENTRY.format(title=title, picture=shown, text=text.strip(), path=path)
        for file in (path, picture):
            app.env.note_dependency(file, docname=docname)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_entries)
    return {"parallel_read_safe": True}
