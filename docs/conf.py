"""Settings of the documentation site: `python -m sphinx -W docs docs/_build` writes docs/_build/index.html.

The pages are the Markdown files of the repository, where they lie (pages.py), and docs/api, which lists the public
names. Their text comes from docstrings (docstrings.py).
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from pages import NAMES, linkcode_resolve, setup  # noqa: E402, F401

import minidl  # noqa: E402

project = "minidl"
author = "the minidl authors"
copyright = author
version = release = minidl.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "markdown"}
include_patterns = ["README.md", *(f"{page}.*" for page in NAMES)]
exclude_patterns = ["docs/_build"]
highlight_language = "none"  # of blocks without a language: formulas and pictures
smartquotes = False  # `--` is an option
myst_heading_anchors = 4  # as GitHub makes them

add_module_names = False
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 90

html_theme = "furo"
html_title = "minidl"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "monokai"  # the first comes with Furo
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#3d5f91", "color-brand-content": "#3d5f91"},
    "dark_css_variables": {"color-brand-primary": "#9db9e0", "color-brand-content": "#9db9e0"},
}
