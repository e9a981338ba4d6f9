"""The pages of the documentation site: which files they are, and what conf.py makes of them.

README.md is the first page. The notebook is a page with the outputs that it contains. A link to a file or folder that
is no page leads to a page with its source code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getsourcefile, getsourcelines, unwrap
from pathlib import Path
from typing import Any

from docstrings import as_rst
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "source"  # the folder of the site with the source code
APP: list[Sphinx] = []  # for linkcode_resolve, which gets no application

LESSONS = re.findall(r"\]\((\w+/\w+)\.md\)", (ROOT / "kernels" / "README.md").read_text(encoding="utf-8"))
CONTENTS = {  # caption -> pages, with the titles that the navigation shows
    "Guide": {"Guide": "docs/guide", "Own models, several replicas": "docs/own_models", "Tutorial": "docs/tutorial"},
    "Methods": {
        "A one-hour course": "docs/decentralised",
        "Methods": "comm/methods/README",
        "Elastic averaging": "docs/elastic",
        "Topologies": "docs/topologies",
        "How they communicate": "comm/README",
        "Terms": "docs/glossary",
    },
    "Kernels": {"The course": "kernels/README", **{
        lesson.removesuffix("/README").replace("/WINOGRAD", ": Winograd"): f"kernels/{lesson}" for lesson in LESSONS
    }},
    "Results": {"Measured": "bench/RESULTS", "SC 2017, repeated": "bench/papers/RESULTS-sc17"},
    "Reference": {f"minidl.{name}".removesuffix(".index").replace("topology", "comm.topology"): f"docs/api/{name}"
                  for name in ("index", "nn", "ops", "optim", "schedules", "data", "models", "topology")},
    "Project": {"Changes": "CHANGELOG", "Contributing": "CONTRIBUTING", "Tests of CUDA kernels": "tests/cuda/README",
                "Security": "SECURITY"},
}  # fmt: skip
NAMES = {page for pages in CONTENTS.values() for page in pages.values()}


class Pages(Project):
    """README.md is the page `index`."""

    def path2doc(self, filename: Any) -> str | None:
        name = super().path2doc(filename)
        return "index" if name == "README" else name if name in NAMES else None


def read(app: Sphinx, page: str, content: list[str]) -> None:
    """Change the text of a page before it is parsed."""
    if page == "docs/tutorial":
        content[0] = "\n\n".join(cells(json.loads(content[0])))
    if page == "index":
        content[0] += "\n\n" + navigation()


def navigation() -> str:
    """Return the lists of pages for the side of each page."""
    lists = []
    for caption, pages in CONTENTS.items():
        lines = "\n".join(f"{title} </{page}>" for title, page in pages.items())
        lists.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```")
    return "\n\n".join(lists)


def cells(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook, with their outputs, as Markdown."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield f"![output](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
            elif "image/svg+xml" in data:
                yield "".join(data["image/svg+xml"])
            else:
                yield f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```"


class SourceLinks(SphinxTransform):
    """Links to files and folders that are no pages lead to pages with their source code."""

    default_priority = 500  # before Sphinx copies the targets of downloads

    def apply(self, **options: Any) -> None:
        kinds = (addnodes.download_reference, addnodes.pending_xref)
        for node in list(self.document.findall(lambda node: isinstance(node, kinds))):
            if node.get("reftype") != "myst" or node.get("refdomain"):
                continue
            path = Path(self.env.relfn2path(node["reftarget"], self.env.docname)[1])
            if path.is_relative_to(ROOT) and path.exists():
                page = self.env.path2doc(str(path / "README.md" if path.is_dir() else path))
                if page not in self.env.found_docs:
                    page = source_page(self.app, path)
                uri = self.app.builder.get_relative_uri(self.env.docname, page)
                node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def source_page(app: Sphinx, path: Path) -> str:
    """Return the name of the page with this file or folder, and note that it is wanted."""
    name = path.resolve().relative_to(ROOT).as_posix()
    if not hasattr(app.env, "minidl_sources"):
        app.env.minidl_sources = set()
    app.env.minidl_sources.add(name)
    return f"{SOURCE}/{name}"


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the pages with source code: name, what the template shows, template."""
    names = set(getattr(app.env, "minidl_sources", ()))
    for name in [name for name in names if (ROOT / name).is_dir()]:
        names.update(path.relative_to(ROOT).as_posix() for path in listed(ROOT / name) if path.is_file())
    for name in sorted(names):
        path = ROOT / name
        body = folder(path) if path.is_dir() else code(path)
        yield f"{SOURCE}/{name}", {"title": name, "body": f"<h1><code>{name}</code></h1>{body}"}, "page.html"


def listed(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.suffix in (".py", ".toml", ".md") or each.name == "LICENSE")


def folder(path: Path) -> str:
    links = (f'<li><a href="{path.name}/{each.name}.html">{each.name}</a></li>' for each in listed(path))
    return f"<ul>{''.join(links)}</ul>"


def code(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    formatter = HtmlFormatter(linenos="inline", lineanchors="line", cssclass="highlight listing", wrapcode=True)
    return highlight(path.read_text(encoding="utf-8"), lexer, formatter)


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the link from a page in docs/api to the source code of a name."""
    value: Any = import_module(info["module"])
    for part in info["fullname"].split("."):
        value = getattr(value, part, None)
    value = unwrap(value.fget if isinstance(value, property) else value) if value is not None else None
    try:
        path, (_, line) = Path(str(getsourcefile(value))).resolve(), getsourcelines(value)
    except (TypeError, OSError):
        return None
    return f"../../{source_page(APP[0], path)}.html#line-{line}" if path.is_relative_to(ROOT) else None


def docstring(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def accessible(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the keyboard reach code and tables that scroll, and give the captions of the navigation a level."""
    for part in {"body", "furo_navigation_tree"} & context.keys():
        text = context[part].replace("<pre>", '<pre tabindex="0">')
        text = text.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
        context[part] = text.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Sphinx) -> None:
    APP[:] = [app]
    app.srcdir = type(app.srcdir)(ROOT)  # pages lie in the whole repository
    app.connect("builder-inited", lambda app: setattr(app.project, "__class__", Pages))
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", accessible, priority=900)  # after Furo's
    app.add_transform(SourceLinks)
