"""A web page in one file: text, tables and pictures that open without a network."""

from __future__ import annotations

import base64
import html
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --paper: #f6f7f9; --card: #ffffff;
  --rule: #dfe3ea; --accent: #2f6fdd; --bad: #b3261e; --good: #17724f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf1; --soft: #a3adbf; --paper: #14171d; --card: #1d222b;
  --rule: #343b48; --accent: #7fb0ff; --bad: #ff8a80; --good: #6fd3a8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 12px; }
p { margin: 0 0 12px; max-width: 78ch; }
.lead { color: var(--soft); font-size: 16px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin: 20px 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 16px; }
.card .name { color: var(--soft); font-size: 13px; }
.card .value { font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.card .more { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 0 16px; }
.grid > * { min-width: 0; }
.cards.four { grid-template-columns: repeat(auto-fill, minmax(min(46%, 240px), 1fr)); }
figure { margin: 0 0 16px; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 14px 10px; min-width: 0; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px; }
figure h3 { font-size: 15px; margin: 0 0 2px; }
figure.drawing svg { max-width: 100%; min-width: 700px; height: auto; }
figure.drawing { background: #ffffff; color: #1d2330; }
figure.drawing figcaption { color: #5b6475; }
.table { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  margin-bottom: 16px; container-type: inline-size; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 10px 14px; color: var(--soft); }
caption span { display: inline-block; position: sticky; left: 14px; max-width: calc(100cqi - 28px); }
th, td { padding: 7px 14px; text-align: left; vertical-align: top; border-top: 1px solid var(--rule); }
th { font-weight: 600; color: var(--soft); }
thead th { border-top: 0; }
th, td { white-space: nowrap; }
.wrap { display: inline-block; min-width: 34ch; white-space: normal; }
.wrap.narrow { min-width: 16ch; }
.whole { white-space: nowrap; }
.close th, .close td { padding: 7px 6px; font-size: 13px; }
.close th:first-child { padding-left: 14px; }
.close tbody th { white-space: normal; }
.number { text-align: right; }
.bad { color: var(--bad); }
.good { color: var(--good); }
.soft { color: var(--soft); }
.plot { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
@media (max-width: 640px) { main { padding: 24px 12px 48px; } th, td { padding: 7px 8px; }
  caption { padding: 10px 8px; } }
.scroll .plot { min-width: 330px; }
.scroll.wide .plot { min-width: 760px; }
.tight th, .tight td { padding: 6px 4px; font-size: 13px; }
.tight td:last-child, .tight th:last-child { padding-right: 8px; }
.tight th:first-child { padding-left: 14px; }
.tight tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 20ch; font-weight: 500;
  color: var(--ink); background: var(--card); position: sticky; left: 0; }
.tight .soft { font-size: 12px; }
.tight .group { text-align: center; border-left: 1px solid var(--rule); }
.tight tr.total > * { font-weight: 600; border-bottom: 2px solid var(--rule); }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px;
  overflow-x: auto; }
footer { margin-top: 40px; color: var(--soft); font-size: 13px; }
.js-plotly-plot .main-svg text { fill: var(--ink) !important; }
.js-plotly-plot .gridlayer path, .js-plotly-plot .zl { stroke: var(--rule) !important; }
"""

PALETTE = ("#2f6fdd", "#d9822b", "#1f9d77", "#b5489a", "#7a6ff0", "#c2483d", "#4b9fb8", "#8a8f3c")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")


@dataclass(frozen=True, slots=True)
class Html:
    """Text that is markup already."""

    text: str


Cell = str | Html


def escape(content: Cell) -> str:
    """Markup of a cell.

    >>> escape("a < b"), escape(Html("<b>a</b>"))
    ('a &lt; b', '<b>a</b>')
    """
    return content.text if isinstance(content, Html) else html.escape(content)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    caption: str,
    numbers: Sequence[int] = (),
    close: bool = False,
) -> Html:
    """A table; the columns counted in `numbers` are set to the right, the first column heads its row.

    Columns stand `close` together where there are many.
    """
    kind = dict.fromkeys(numbers, ' class="number"')
    head = "".join(f'<th scope="col"{kind.get(i, "")}>{html.escape(name)}</th>' for i, name in enumerate(columns))
    body = []
    for row in rows:
        cells = [f'<th scope="row"{kind.get(0, "")}>{escape(row[0])}</th>']
        cells += [f"<td{kind.get(i, '')}>{escape(cell)}</td>" for i, cell in enumerate(row) if i]
        body.append(f"<tr>{''.join(cells)}</tr>")
    lines = "\n".join(body)
    return Html(
        f'<div class="table{" close" if close else ""}" role="region" aria-label="{html.escape(caption)}" tabindex="0">'
        f"<table><caption><span>{html.escape(caption)}</span></caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n"
        "</tbody></table></div>"
    )


def cards(entries: Sequence[tuple[str, str, str]], *, four: bool = False) -> Html:
    """Name, value and a remark, side by side; `four` of them in a row at most."""
    inner = "".join(
        f'<div class="card"><div class="name">{html.escape(name)}</div><div class="value">{html.escape(value)}</div>'
        f'<div class="more">{html.escape(more)}</div></div>'
        for name, value, more in entries
    )
    return Html(f'<div class="cards{" four" if four else ""}">{inner}</div>')


def heading(text: str) -> Html:
    """A heading of a section."""
    return Html(f"<h2>{html.escape(text)}</h2>")


def paragraph(content: Cell, *, lead: bool = False) -> Html:
    """A paragraph."""
    kind = ' class="lead"' if lead else ""
    return Html(f"<p{kind}>{escape(content)}</p>")


def code(text: str) -> Html:
    """Commands or output, as typed."""
    return Html(f"<pre><code>{html.escape(text)}</code></pre>")


def grid(*parts: Html) -> Html:
    """Pictures side by side where the page is wide enough."""
    return Html(f'<div class="grid">{"".join(part.text for part in parts)}</div>')


def drawing(svg: str, *, title: str, caption: str) -> Html:
    """A picture that is markup already; it keeps a white ground, and narrow windows scroll it."""
    return Html(
        f'<figure class="drawing" role="group"><h3>{html.escape(title)}</h3>'
        f'<div class="scroll" tabindex="0">{svg}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def picture(svg: str, *, title: str, caption: str, wide: bool = False) -> Html:
    """A picture that is markup already and takes the page's colours; narrow windows scroll it."""
    return Html(
        f'<figure role="group" aria-label="{html.escape(title)}"><h3>{html.escape(title)}</h3>'
        f'<div class="scroll{" wide" if wide else ""}" tabindex="0">{svg}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def log_axis(values: Sequence[float], text: Callable[[float], str]) -> dict[str, object]:
    """An axis for `chart` with ticks at 1, 2 and 5 of each decade, at every digit of an axis shorter than one.

    >>> log_axis([70.0, 700.0], "{:g}".format)
    {'type': 'log', 'tickvals': [50.0, 100.0, 200.0, 500.0, 1000.0], 'ticktext': ['50', '100', '200', '500', '1000']}
    """
    low, high = min(values), max(values)
    digits = range(1, 10) if high < 8 * low else (1, 2, 5)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    shown = [tick for tick in ticks if low / 2 <= tick <= 2 * high]
    return {"type": "log", "tickvals": shown, "ticktext": [text(tick) for tick in shown]}


def chart(figure: go.Figure, *, identity: str, title: str, caption: str, height: int = 330) -> Html:
    """An interactive picture, which the page draws when it is open."""
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 16, "t": 34, "b": 46},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal"},
        template="none",
    )
    figure.update_xaxes(gridcolor="#dfe3ea", zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor="#dfe3ea", zeroline=False, automargin=True)
    data = figure.to_json().replace("<", "\\u003c")
    markup = (
        f'<div id="{html.escape(identity)}" style="height:{height}px"></div>'
        f'<script type="application/json" class="chart" data-at="{html.escape(identity)}">{data}</script>'
    )
    return Html(
        f'<figure role="group" aria-label="{html.escape(title)}"><h3>{html.escape(title)}</h3>{markup}'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def page(title: str, parts: Sequence[Html], *, footer: str, interactive: bool = True) -> str:
    """The whole page as text, styles inside, and the script of interactive pictures where there are any."""
    script = _charts_script() if interactive else ""
    body = "\n".join(part.text for part in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{html.escape(title)}</h1>\n{body}\n<footer>{html.escape(footer)}</footer>\n</main>\n"
        f"{script}</body>\n</html>\n"
    )


_DRAW = """
(async () => {
  const text = document.getElementById("library").textContent, letters = "%(letters)s";
  const digit = new Uint8Array(128), bytes = new Uint8Array(%(size)d + 4);
  for (let i = 0; i < 85; i++) digit[letters.charCodeAt(i)] = i;
  for (let i = 0, at = 0; i < text.length; i += 5) {
    let word = 0;
    for (let j = i; j < i + 5; j++) word = word * 85 + digit[text.charCodeAt(j)];
    for (let shift = 3; shift >= 0; shift--) bytes[at++] = Math.floor(word / 256 ** shift) %% 256;
  }
  const stream = new Blob([bytes.slice(0, %(size)d)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  for (const one of document.querySelectorAll("script.chart")) {
    const {data, layout} = JSON.parse(one.textContent);
    Plotly.newPlot(one.dataset.at, data, layout, {displaylogo: false, responsive: true, displayModeBar: false});
  }
  document.body.dataset.drawn = "true";
})();
"""
"""Unpacks Plotly's script and draws the charts; packed it takes 1.8 MB instead of 4.8."""
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;:=>?@^_`{|}~"
"""Digits of base 85 without the letter that begins markup."""


@cache
def _charts_script() -> str:
    """Plotly's script, packed, and what unpacks it and draws the charts."""
    from plotly.offline import get_plotlyjs

    packed = zlib.compress(get_plotlyjs().encode(), 9)
    padded = packed + bytes(-len(packed) % 4)
    text = base64.b85encode(padded).decode().replace("<", ":")
    draw = _DRAW % {"letters": _LETTERS, "size": len(packed)}
    return f'<script type="text/plain" id="library">{text}</script>\n<script>{draw}</script>\n'
