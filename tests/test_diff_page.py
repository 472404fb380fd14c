"""The page of a comparison in a real browser: it draws what was found, and nothing in a name can make it act."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.comparison.result import Comparison, Renamed
from ckpttool.render.page import page
from tests import compared
from tests.browsing import Browser, browsing, find

CANARY = "globalThis.canary = 1"
HOSTILE = (
    f"</script><script>{CANARY}</script>",
    f'"><img src=x onerror="{CANARY}">',
    f"'><svg onload='{CANARY}'>.layers.1.w",
    f"<!--<script>{CANARY}//",
    f"]]></title></style><script>{CANARY}</script>",
    "layers.0.<b>bold</b>.weight",
    "https://example.com/javascript:alert(1)",
    "evil\u202egnp.exe\u2066\u2069.\u200b\ud800\x00\x1b[31m\n\u2028",
    "&lt;script&gt;&amp;",
    "long." + "x" * 1_000_000,
)

if find() is None and "CI" not in os.environ:
    pytest.skip("no Chromium or Chrome is installed", allow_module_level=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as started:
        yield started


def show(browser: Browser, found: Comparison, folder: Path, fragment: str = "", **how: Any) -> Path:
    """Open the page of a comparison, and hold that it loads without a fault and asks for nothing."""
    path = folder / "diff.html"
    path.write_text(page(found), encoding="utf-8")
    browser.open(path, fragment, **how)
    assert [asked["request"]["url"] for asked in browser.told("Network.requestWillBeSent")] == [path.as_uri()]
    assert browser.told("Runtime.exceptionThrown") == []
    assert browser.told("Log.entryAdded") == []
    if how.get("scripts", True):
        assert browser.ask("document.documentElement.dataset.error ?? ''") == ""
        assert browser.ask("document.documentElement.dataset.ready") == str(len(found.of(["differs", "close"])))
    return path


def listed(browser: Browser, column: int = 0) -> list[str]:
    """A column of the list of tensors."""
    return list(
        browser.ask(f"[...document.querySelectorAll('#tensors tbody tr')].map(r => r.cells[{column}].innerText)")
    )


def bars(browser: Browser, measure: str) -> dict[str, float]:
    """How high the bar of each layer is drawn, as a part of the chart."""
    found = browser.ask(
        f"[...document.querySelectorAll('#chart-{measure} .bar')].map(g => {{"
        " const whole = g.querySelector('.hit'), bar = g.querySelector('[class^=l]:not(.lost)');"
        " return [g.dataset.layer, bar ? bar.getBoundingClientRect().height / whole.getBoundingClientRect().height : 0]"
        "})"
    )
    return dict(found)


def order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: values[i])


def colours(selector: str) -> str:
    """An expression: the colours of these boxes."""
    return f"[...document.querySelectorAll('{selector}')].map(c => getComputedStyle(c).backgroundColor)"


def visible(browser: Browser) -> list[str]:
    """The charts that are to be seen."""
    return list(browser.ask("[...document.querySelectorAll('.chart')].filter(c => c.checkVisibility()).map(c => c.id)"))


@pytest.mark.parametrize("measure", ["rel_l2", "share", "max_abs"])
def test_bars_are_as_high_as_the_measure_that_the_address_names(browser: Browser, tmp_path: Path, measure: str) -> None:
    found = compared.dense()
    show(browser, found, tmp_path, f"#measure={measure}")
    assert visible(browser) == [f"chart-{measure}"]
    drawn = bars(browser, measure)
    values = {
        "rel_l2": [cell.rel_l2 or 0.0 for cell in found.layers.values()],
        "share": [cell.changed / cell.elements for cell in found.layers.values()],
        "max_abs": [cell.max_abs for cell in found.layers.values()],
    }[measure]
    assert list(drawn) == [str(layer) for layer in found.layers]
    heights = [drawn[str(layer)] for layer in found.layers]
    assert order(heights) == order(values)
    # a bar is linear in the measure, or in its logarithm: any two of them tell how high a third one is
    points = values if measure == "share" else [math.log10(value) for value in values]
    low, high = order(points)[0], order(points)[-1]
    slope = (heights[high] - heights[low]) / (points[high] - points[low])
    assert heights == pytest.approx([heights[low] + slope * (point - points[low]) for point in points], abs=2e-3)
    if measure == "share":
        assert heights[low] == pytest.approx(values[low], abs=2e-3)  # up to 100%, from 0
    else:
        assert round(1 / slope, 3) in (1, 2, 3)  # whole decades


def test_the_measure_is_switched_without_the_script_too(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.patched(), tmp_path, scripts=False)
    assert visible(browser) == ["chart-rel_l2"]
    browser.ask("document.querySelector('label:has(#measure-share)').click()")
    assert visible(browser) == ["chart-share"]


def test_layers_that_did_not_move_have_no_bar_and_no_colour(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.patched(moved=(3, 11)), tmp_path)
    drawn = bars(browser, "rel_l2")
    assert {layer for layer, height in drawn.items() if height} == {"3", "11"}
    assert browser.ask("document.querySelectorAll('#heat tbody tr').length") == 1 + len(compared.DENSE)
    for row in range(1, 2 + len(compared.DENSE)):
        shown = browser.ask(colours(f"#heat tbody tr:nth-child({row}) .cell"))
        assert [i for i, colour in enumerate(shown) if colour != shown[0]] == [3, 11]


def test_colours_follow_the_measure_that_is_chosen(browser: Browser, tmp_path: Path) -> None:
    """A layer of which all elements moved a little is dark by share and light by distance; and the other way round."""
    found = compared.patched(layers=4, moved=(1, 2))
    tensors = []
    for one in found.tensors:
        if one.metrics is not None and one.metrics.changed:
            few, far = (one.metrics.elements, 1e-5) if one.layer == 1 else (1, 0.5)
            one = replace(one, metrics=replace(one.metrics, changed=few, rel_l2=far, max_abs=far))
        tensors.append(one)
    show(browser, compared.comparison(tensors), tmp_path)
    row, swatch = map(colours, ("#heat tbody tr:nth-child(2) .cell", ".legend.of-rel_l2 .cell"))
    scale = browser.ask(swatch)
    near, far = scale.index(browser.ask(row)[1]), scale.index(browser.ask(row)[2])
    assert (near, far) == (4, 8)  # of five decades, and one a level
    browser.ask("document.getElementById('measure-share').click()")
    assert [scale.index(colour) for colour in browser.ask(row)[1:3]] == [8, 1]
    assert browser.ask("location.hash") == "#measure=share"


def test_what_one_side_lacks_is_marked(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.routed(layers=18, experts=6), tmp_path)
    marked = browser.ask(
        "[...document.querySelectorAll('#heat tbody tr')].filter(r => r.querySelector('.missing')).map(r => "
        "[r.cells[0].innerText, r.querySelector('.missing').parentNode.dataset.layer])"
    )
    assert marked == [
        *(["all modules", "17"], ["mlp.experts.*.gate_proj", "17"], ["mlp.experts.*.up_proj", "17"]),
        *(["mlp.experts.*.down_proj", "17"], ["mlp.extra", "17"]),
    ]
    text = browser.ask("document.body.innerText")
    assert "model.layers.17.mlp.experts.5.up_proj.weight  ->  model.layers.17.mlp.extra.weight" in text


def test_the_list_is_that_of_the_page_without_its_script(browser: Browser, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    odd = [compared.tensor(f"odd.{i}.w", (7, 11), float(10.0**-i), rng) for i in range(1, 13)]
    found = compared.dense(layers=6)
    lost = replace(odd[0], name="lost", metrics=replace(odd[0].metrics or compared.metrics((1,), 1, rng), rel_l2=None))
    found = compared.comparison([*found.tensors, *odd, lost, compared.reshaped(odd[1], (3,))])
    show(browser, found, tmp_path, scripts=False)
    without = [listed(browser, column) for column in range(8)]
    assert browser.ask("[...document.querySelectorAll('.controls')].every(c => !c.checkVisibility())")
    show(browser, found, tmp_path)
    assert [listed(browser, column) for column in range(8)] == without
    assert len(without[0]) == len(found.of(["differs"])) < 100


def test_the_list_is_filtered_and_sorted_by_the_address(browser: Browser, tmp_path: Path) -> None:
    found = compared.dense()
    show(browser, found, tmp_path, "#filter=layer%3A3-4+q_proj&sort=name")
    assert listed(browser) == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (3, 4)]
    show(browser, found, tmp_path, "#filter=layer%3A3&sort=max_abs")
    names = listed(browser)
    known = {one.name: one.metrics.max_abs for one in found.of(["differs"]) if one.layer == 3 and one.metrics}
    assert names == sorted(known, key=lambda name: -known[name])
    heads = browser.ask("[...document.querySelectorAll('#tensors thead th')].map(h => h.ariaSort)")
    assert heads == ["none"] * 3 + ["descending"] + ["none"] * 4


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_it_round(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.patched(), tmp_path)
    browser.ask("document.querySelectorAll('#tensors thead button')[5].click()")
    down = listed(browser, 5)
    browser.ask("document.querySelectorAll('#tensors thead button')[5].click()")
    assert browser.ask("location.hash") == "#sort=-rel_l2"
    up = [float(text) for text in listed(browser, 5) if text != "-"]
    assert up == sorted(up)
    assert down[0] == "-"  # two shapes lie outside of any scale
    assert [float(text) for text in down[1:]] == up[::-1]


def test_a_click_on_a_bar_lists_its_layer(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.patched(), tmp_path)
    browser.ask("document.querySelector('.bar[data-layer=\"11\"]').dispatchEvent(new MouseEvent('click'))")
    assert {name.split(".")[2] for name in listed(browser)} == {"11"}
    assert len(listed(browser)) == len(compared.DENSE)


def test_thirty_thousand_tensors_are_all_there_and_few_are_drawn(browser: Browser, tmp_path: Path) -> None:
    found = compared.routed(layers=48, experts=220)
    assert len(found.tensors) > 30_000
    show(browser, found, tmp_path)
    differing = len(found.of(["differs"]))
    assert len(listed(browser)) == 200
    assert browser.ask("document.getElementById('count').innerText") == f"200 of {differing:,}"
    assert browser.ask("document.querySelectorAll('*').length") < 8_000
    browser.ask("document.getElementById('more').click()")
    assert len(listed(browser)) == 400
    last = found.of(["differs"])[-1].name
    browser.ask(f"location.hash = 'filter={last}'; new Promise(done => setTimeout(done, 50))")
    assert listed(browser) == [last]


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    differing = [compared.tensor(name, (4, 4), 0.1, rng) for name in HOSTILE]
    extra = [compared.one_sided(compared.tensor(f"{name}.B", (4,), 0.0, rng), "only in B") for name in HOSTILE]
    found = compared.comparison([*differing, *extra], [Renamed(a=name, b=name) for name in HOSTILE])
    side = replace(found.a, path=HOSTILE[1], title=HOSTILE[0], left_out={HOSTILE[4]: 1})
    path = show(browser, replace(found, a=side, plan=HOSTILE[3]), tmp_path)
    assert browser.ask("globalThis.canary ?? 0") == 0
    assert browser.ask("[...document.querySelectorAll('img, b:not(.tiles b), iframe, object, a, link')].length") == 0
    assert browser.ask("document.scripts.length") == 2
    names = listed(browser)
    assert set(HOSTILE[:7]) <= set(names)
    assert HOSTILE[8] in names
    assert any(name.startswith("evil\\u202egnp") and "\\x00\\x1b" in name for name in names)
    assert max(map(len, names)) < 500
    text = path.read_text()
    assert not {"\u202e", "\u2066", "\u2028", "\x00", "\x1b"} & set(text)
    assert len(text) < 200_000
    data = browser.ask("document.getElementById('data').textContent")
    assert len(json.loads(data)["rows"]) == len(HOSTILE)


def test_the_policy_refuses_any_other_script_and_any_request(browser: Browser, tmp_path: Path) -> None:
    """So that even a name that became markup could do nothing."""
    show(browser, compared.patched(), tmp_path)
    violated = browser.ask(
        "new Promise(done => { const seen = []; addEventListener('securitypolicyviolation', "
        "e => { seen.push(e.effectiveDirective); if (seen.length === 4) done(seen.sort()); });"
        f"document.body.insertAdjacentHTML('beforeend', '<img src=x.png onerror=\"{CANARY}\"><i style=color:red>');"
        f"const s = document.createElement('script'); s.textContent = '{CANARY}'; document.body.append(s); }})"
    )
    assert violated == ["img-src", "script-src-attr", "script-src-elem", "style-src-attr"]
    assert browser.ask("globalThis.canary ?? 0") == 0


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("make", [compared.dense, compared.routed, compared.patched])
def test_the_page_is_never_wider_than_the_window(browser: Browser, tmp_path: Path, make: Any, width: int) -> None:
    show(browser, make(), tmp_path, width=width)
    assert browser.ask("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("make", [compared.dense, compared.routed])
def test_a_printed_page_is_whole(browser: Browser, tmp_path: Path, make: Any) -> None:
    """On paper nothing scrolls: the charts and the map end where the paper does."""
    show(browser, make(), tmp_path, width=720)
    browser.send("Emulation.setEmulatedMedia", media="print")
    wide = browser.ask("[...document.querySelectorAll('.chart, table')].map(t => t.getBoundingClientRect().right)")
    browser.send("Emulation.setEmulatedMedia", media="")
    assert max(wide) <= 720
    assert max(wide) > 600


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_stands_out_from_what_is_behind_it(browser: Browser, tmp_path: Path, dark: bool) -> None:
    """By the contrast that WCAG asks of small text."""
    browser.emulate(dark=dark)
    show(browser, compared.routed(layers=18, experts=6), tmp_path)
    found = browser.ask(CONTRAST)
    browser.emulate(dark=False)
    assert len(found) > 50
    assert [what for what in found if what[1] < 4.5] == []


CONTRAST = """
(() => {
  const light = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = getComputedStyle(at).backgroundColor;
      if (found !== "rgba(0, 0, 0, 0)") return light(found);
    }
  };
  return [...document.querySelectorAll("body *")]
    .filter(n => n.checkVisibility() && [...n.childNodes].some(c => c.nodeType === 3 && c.data.trim()))
    .filter(n => !["SCRIPT", "title", "desc"].includes(n.tagName))
    .map(n => {
      const style = getComputedStyle(n), a = light(n.closest("svg") ? style.fill : style.color), b = behind(n);
      return [n.textContent.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
})()
"""


def test_charts_and_tables_say_what_they_are(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.patched(moved=(3, 11)), tmp_path)
    tree = browser.send("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"]]
    roles = {role for role, _ in named}
    assert ("image", "Relative L2 by layer") in named
    assert {"radio", "rowheader", "columnheader", "searchbox"} <= roles
    described = [n.get("description", {}).get("value", "") for n in tree]
    assert any("2 of 24 bars; the highest is layer" in text for text in described)


def test_two_that_are_the_same_make_a_page_too(browser: Browser, tmp_path: Path) -> None:
    show(browser, compared.comparison([]), tmp_path)
    show(browser, compared.patched(moved=()), tmp_path)
    rng = np.random.default_rng(0)
    show(browser, compared.comparison([compared.tensor("model.layers.0.w", (3,), 0.0, rng)]), tmp_path)
    assert browser.ask("document.querySelector('h1').innerText") == "same 1 tensor of both are equal"
