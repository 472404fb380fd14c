"""A comparison as one page of HTML that needs nothing else: no network, no font, no script of others.

All of it can be seen without its script, which filters and sorts the list of tensors, and keeps the state of the page
in its address. The policy of the page lets exactly that script and that style run, whatever a name says.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ckpttool import __version__
from ckpttool.comparison.result import PAGE_BEGINS, Cell, Comparison, Side, State
from ckpttool.errors import Problem
from ckpttool.formats.folding import folded
from ckpttool.render.heat import elsewhere, flags, headline
from ckpttool.render.page.drawing import charts
from ckpttool.render.page.listing import listing, rows_of
from ckpttool.render.page.mapping import maps
from ckpttool.render.page.writing import MEASURES, legends, scales_of, shown, shown_lines, switching
from ckpttool.render.terminal import duration, plural, size

HERE = Path(__file__).parent


def page(found: Comparison) -> str:
    """Return a comparison as the text of a page, in UTF-8: one file, whatever is in the names of tensors."""
    style, script = f"\n{_part('page.css')}{switching()}\n", f"\n{_part('page.js')}"
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    word, what = headline(found)
    body = "".join(_body(found, word, what))
    data = json.dumps({"rows": rows_of(found)}, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'{PAGE_BEGINS}<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{word}: {shown(found.a.path)} and {shown(found.b.path)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n{body}"
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _part(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _body(found: Comparison, word: str, what: str) -> Iterator[str]:
    yield f'<header>\n<h1><span class="verdict {word}">{word}</span> {shown(what)}</h1>\n'
    yield f'<dl class="sides">{_side("A", found.a)}{_side("B", found.b)}</dl>\n{_tiles(found)}</header>\n<main>\n'
    if found.layers or found.strips:
        scales = scales_of([*_cells(found)])
        yield f"{_switch()}{legends(scales)}"
        yield charts(found, scales)
        yield maps(found, scales)
    yield listing(found)
    yield from _one_sided(found)
    yield _notes(found.notes)
    yield f"</main>\n{_footer(found)}"


def _cells(found: Comparison) -> Iterator[Cell]:
    """Yield what is coloured."""
    yield from found.layers.values()
    for strip in found.strips:
        yield from (strip.whole, *strip.layers.values())


def _side(letter: str, side: Side) -> str:
    left = "".join(f"; not compared: {name} ({plural(count, 'tensor')})" for name, count in side.left_out.items())
    there = f" in {root}" if (root := elsewhere(side)) else ""
    what = shown(f"{side.title}{there}, {plural(side.tensors, 'tensor')}{left}")
    return f"<div><dt>{letter}</dt><dd><code>{shown(side.path)}</code><br>{what}</dd></div>"


_TILES: dict[State, str] = {
    "equal": "equal",
    "close": "within tolerance",
    "differs": "differ",
    "only in A": "only in A",
    "only in B": "only in B",
}


def _tiles(found: Comparison) -> str:
    """Return the counts of tensors by state; a tolerance that took no effect is no tile."""
    counts = [(state, count) for state, count in found.counts.items() if count or state != "close"]
    tiles = "".join(
        f'<li class="{"some" if count and state not in ("equal", "close") else "none"}">'
        f"<b>{count:,}</b> {_TILES[state]}</li>"
        for state, count in counts
    )
    return f'<ul class="tiles" aria-label="tensors">{tiles}</ul>\n'


def _switch() -> str:
    """Return the choice of the measure that is drawn; the style sheet alone acts on it."""
    choices = "".join(
        f'<label><input type="radio" name="measure" id="measure-{m.key}" value="{m.key}"{" checked" * (i == 0)}>'
        f"<span>{m.name}</span></label>"
        for i, m in enumerate(MEASURES)
    )
    return f'<fieldset class="switch"><legend>Show</legend>{choices}</fieldset>\n'


def _one_sided(found: Comparison) -> Iterator[str]:
    sides: tuple[State, ...] = ("only in A", "only in B")
    for state in sides:
        if names := [tensor.name for tensor in found.of([state])]:
            lines = [f"{pattern}  ({count:,})" if count > 1 else pattern for pattern, count in folded(names)]
            yield _folded_list(f"O{state[1:]}", plural(len(names), "tensor"), lines)
    if found.renamed:
        lines = [f"{pair.a}  ->  {pair.b}" for pair in found.renamed]
        yield _folded_list("Perhaps renamed", "same shape, dtype and content", lines)


def _folded_list(title: str, what: str, lines: list[str]) -> str:
    return (
        f'<section><h2>{title} <small>{what}</small></h2>\n<pre class="names" tabindex="0" aria-label="{title}">'
        f"{shown_lines(lines)}</pre></section>\n"
    )


def _notes(notes: tuple[Problem, ...]) -> str:
    if not notes:
        return ""
    lines = "".join(
        f"<li>{shown(f'{note.path}: {note.message}' if note.path else note.message)}"
        f"{f'<br><small>{shown(note.hint)}</small>' if note.hint else ''}</li>"
        for note in notes
    )
    return f"<section><h2>Notes</h2><ul>{lines}</ul></section>\n"


def _footer(found: Comparison) -> str:
    said = [f"{size(found.bytes_read)} read in {duration(found.seconds)}"]
    if found.plan:
        said.insert(0, found.plan)
    if found.trusted:
        said.append(f"{plural(found.trusted, 'tensor')} not read: both sides record the same checksum")
    if found.excluded:
        said.append(f"{plural(found.excluded, 'tensor')} excluded by their names")
    if options := flags(found.options):
        said.append(f"options: {' '.join(options)}")
    return f"<footer>{shown('; '.join(said))}. Made by ckpttool {__version__}.</footer>\n"
