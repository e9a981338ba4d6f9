"""HTML of the pages. Every text is escaped here: names and options of a run may contain anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NewType

NUMBER = re.compile(r"[-+\d.,]+(e[-+]?\d+)?%?( ± [\d.,e+-]+%?)?|–")
Html = NewType("Html", str)  # text that is already escaped

STYLE = """
:root { color-scheme: light dark; --ink: #1b1e24; --paper: #ffffff; --soft: #565d6a; --rule: #d5d9e0; --grid: #e3e6eb;
  --tint: #f3f5f8; --warn: #8a4b00; --c1: #2f6db0; --c2: #b5501c; --c3: #2c7d55; --c4: #96479b; --c5: #8a6d00;
  --c6: #b0344d; --c7: #3e7c87; --c8: #6b6f78; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --paper: #14161a; --soft: #a6adb9; --rule: #3a404b;
  --grid: #2b3039; --tint: #1e2127; --warn: #f0b060; --c1: #6aa9ec; --c2: #f08a55; --c3: #5fc491; --c4: #d18ad6;
  --c5: #d9b93b; --c6: #f2798f; --c7: #7ac3cf; --c8: #a6adb9; } }
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
h2 { border-top: 1px solid var(--rule); padding-top: 1rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { max-width: 46rem; margin: .5rem 0; } .lead { font-size: 1.1rem; } .note, figcaption { color: var(--soft); }
figcaption, .small { font-size: .875rem; } .note { border-left: 3px solid var(--rule); padding-left: .7rem; }
.warn { color: var(--warn); font-weight: 600; }
.figures { display: grid; align-items: start; gap: 1rem 1.5rem; margin: .8rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; break-inside: avoid; } figure svg { display: block; width: 100%; height: auto; max-width: 40rem; }
figure svg * { stroke-linejoin: round; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; overflow-wrap: normal; }
.small { color: var(--soft); margin: .6rem 0 .1rem; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.number, th.number { text-align: right; } thead th { color: var(--soft); font-weight: 600; }
table.matrix td { text-align: center; min-width: 2rem; border: 1px solid var(--grid); }
.images { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr)); }
.images img { width: 100%; max-width: 7rem; image-rendering: pixelated; display: block; }
pre { background: var(--tint); padding: .6rem; overflow-x: auto; font-size: .8rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
@media print { body { max-width: none; padding: 0; } .scroll { overflow: visible; } pre { white-space: pre-wrap; }
  h2 { break-after: avoid; } }
"""


def text(value: object) -> Html:
    """Escape a text. Characters that HTML does not allow become a replacement character."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return Html(escape(plain, quote=True))


def join(parts: Iterable[str], between: str = "\n") -> Html:
    return Html(between.join(part for part in parts if part))


def page(title: str, *parts: str) -> str:
    """Return a whole page. The first part has the heading of level 1."""
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; "
        "style-src 'unsafe-inline'\">",
        f"<title>{text(title)}</title>", f"<style>{STYLE}</style>", "</head>", "<body>", "<main>", *filter(None, parts),
        "</main>", "</body>", "</html>", "",
    ])  # fmt: skip


def heading(level: int, words: str) -> Html:
    return Html(f"<h{level}>{text(words)}</h{level}>")


def paragraph(words: str, kind: str = "") -> Html:
    """Return a paragraph. kind: lead, note or warn."""
    return Html(f'<p class="{kind}">{text(words)}</p>' if kind else f"<p>{text(words)}</p>")


def note(words: str) -> Html:
    """Return a line about something that is left out."""
    return paragraph(words, "note")


def code(words: str) -> Html:
    return Html(f'<pre tabindex="0">{text(words)}</pre>')


def section(title: str, *parts: str) -> Html:
    """Return a section with a heading of level 2; nothing if it has no parts."""
    inside = join(parts)
    return Html(f"<section>\n{heading(2, title)}\n{inside}\n</section>") if inside else Html("")


def figures(*parts: str) -> Html:
    """Return figures side by side, if the page is wide."""
    inside = join(parts)
    return Html(f'<div class="figures">\n{inside}\n</div>') if inside else Html("")


def figure(svg: str, caption: str) -> Html:
    """Return a figure. svg: from `figures.Figures.draw`, already escaped."""
    return Html(f"<figure>\n{svg}\n<figcaption>{text(caption)}</figcaption>\n</figure>")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> Html:
    """Return a table. The first cell of each row is its heading. Columns of numbers are aligned right."""
    every = [list(map(str, row)) for row in rows]
    right = [' class="number"' if at and all(NUMBER.fullmatch(row[at]) for row in every) else ""
             for at in range(len(head))]  # fmt: skip
    columns = "".join(f'<th scope="col"{kind}>{text(word)}</th>' for kind, word in zip(right, head))
    lines = []
    for row in every:
        cells = "".join(f"<td{kind}>{text(value)}</td>" for kind, value in zip(right[1:], row[1:]))
        lines.append(f'<tr><th scope="row">{text(row[0])}</th>{cells}</tr>')
    return _scrolling(caption, columns, lines)


def _scrolling(caption: str, columns: str, lines: Sequence[str], kind: str = "plain") -> Html:
    """Return a table in a box that scrolls if the page is narrow. Columns and lines are HTML."""
    inside = "\n".join(lines)
    return Html(f'<p class="small">{text(caption)}</p>\n'
                f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
                f'<table class="{kind}">\n<thead><tr>{columns}</tr></thead>\n'
                f"<tbody>\n{inside}\n</tbody></table></div>")  # fmt: skip


def matrix(names: Sequence[str], counts: Sequence[Sequence[int]], caption: str) -> Html:
    """Return a confusion matrix: rows are true classes. Wrong answers are orange, right ones blue."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    lines = []
    for row, (name, values) in enumerate(zip(names, counts)):
        total = max(1, sum(values))
        cells = "".join(
            f'<td style="background: rgba({"70, 130, 200" if row == column else "230, 120, 40"}, '
            f'{0.08 + 0.3 * value / total:.2f})">{value:,}</td>' if value else "<td></td>"
            for column, value in enumerate(values)
        )  # fmt: skip
        lines.append(f'<tr><th scope="row">{text(name)}</th>{cells}</tr>')
    return _scrolling(caption, f'<th scope="col">true</th>{head}', lines, "matrix")


def images(pictures: Iterable[tuple[str, str]]) -> Html:
    """Return a grid of pictures. Each is (data of a PNG in base64, what it shows)."""
    found = [f'<figure><img src="data:image/png;base64,{data}" alt="{text(words)}">'
             f"<figcaption>{text(words)}</figcaption></figure>" for data, words in pictures]  # fmt: skip
    return Html('<div class="images">\n' + "\n".join(found) + "\n</div>") if found else Html("")
