"""Builds the site: ``sphinx-build -W --keep-going -n docs docs/_build``."""

import inspect
import sys
from importlib import metadata
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "_extensions"))

project = "pytensor_ml"
release = metadata.version("pytensor_ml")
html_show_copyright = False

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "broken_links",
    "gallery",
    "references",
]
exclude_patterns = ["_build", "examples"]
templates_path = ["_templates"]
# Options such as --quick keep both dashes.
smartquotes = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Types of parameters are told in the docstrings, with their shapes.
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autosummary_ignore_module_all = False
numpydoc_show_class_members = False
# Other projects' pages are not at hand offline, and constants have no entries.
nitpick_ignore_regex = [(r"py:.*", r"(jax|numpy|pytensor)\..*"), (r"py:data", r".*")]

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {page: [] for page in ("benchmarks", "contributing", "gallery", "moving")}
html_theme_options = {
    "logo": {"text": project},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "footer_start": [],
    "footer_end": ["sphinx-version"],
}


def skip_data(app, what, name, obj, skip, options):
    """Leave data of classes to the sections Parameters and Attributes."""
    # Autosummary asks about the classes of a module, too.
    is_code = inspect.isroutine(obj) or isinstance(obj, property)
    return (
        True if what == "class" and not is_code and getattr(obj, "__name__", "") != name else None
    )


def setup(app):
    app.connect("autodoc-skip-member", skip_data)
