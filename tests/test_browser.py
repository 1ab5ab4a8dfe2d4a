"""The report in a real browser: Chromium, offline, on a desk and on a phone."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

import everfed as ef
from everfed.records import collect
from everfed.report.page import gather, render

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZES = {"desk": (1280, 900), "phone": (390, 800)}
METHODS = {
    "fedavg": ("#000000", ef.methods.fedavg()),
    "special": ("#E69F00", ef.methods.special(0.1)),
    "fedeve": ("#0072B2", ef.methods.fedeve()),
}
EVIL = [
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "<!--<script>",
    "${window.hacked = 3} {{data}} \u2028 \\u003c",
    "дом 域 مجال 🩺 " + "long " * 300,
]


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        why = "no Chromium here: scripts/system-packages chromium installs it on Debian"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real runs, two seeds of each method."""
    folder = tmp_path_factory.mktemp("runs")
    stream = ef.streams.domains(ef.data.digits(["plain", "inverted"]), clients=5, rounds=4)
    for name, (_, method) in METHODS.items():
        for seed in (0, 1):
            place = folder / f"{name}-{seed}"
            ef.run(method, stream, ef.models.mlp(64, 16, 10), sample=3, seed=seed, folder=place)
    return [folder / f"{name}-{seed}" for name in METHODS for seed in (0, 1)]


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(gather(collect(runs))))
    return path


@pytest.fixture
def opened(browser):
    """Opens a page; at the end nothing may have gone wrong or left the machine."""
    contexts, trouble = [], []

    def go(path, size="desk", **more):
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, offline=True, **more
        )
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda m: trouble.append(m.text) if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:")) else trouble.append(r.url),
        )
        page.goto(path.as_uri())
        page.wait_for_selector("#time figure svg")
        return page

    yield go
    for context in contexts:
        context.close()
    assert trouble == []


#: marks of a colour in each chart of a section: what is drawn, without axes and icons
MARKS = """([section, colours]) => [...document.querySelectorAll(`${section} figure`)]
    .filter((figure) => !figure.hidden)
    .map((figure) => [...figure.querySelectorAll("path")].filter((path) =>
        colours.some((c) => [path.getAttribute("stroke"), path.getAttribute("fill")]
            .some((own) => own && own.toLowerCase() === c.toLowerCase()))
        && (path.getAttribute("d") || "").length > 20).length)"""


def marks(page, section, *colours):
    return page.evaluate(MARKS, [section, colours])


@pytest.mark.parametrize("size", list(SIZES))
def test_charts_are_drawn(report, opened, size):
    page = opened(report, size)
    hues = [hue for hue, _ in METHODS.values()]
    assert len(marks(page, "#time", *hues)) == 3  # all tasks, and each of the two
    assert min(marks(page, "#time", *hues)) >= 2 * len(METHODS)  # lines and bands
    assert min(marks(page, "#trade", *hues)) >= len(METHODS)
    panels = page.locator("#panels figcaption").all_inner_texts()
    drawn = dict(zip(panels, marks(page, "#panels", *hues), strict=True))
    assert all(drawn.values()), drawn
    assert any(title.startswith("Kalman gain") for title in panels)
    heat = page.evaluate(
        "[...document.querySelectorAll('#matrices figure')].map(f => f.querySelectorAll('path[fill^=rgb]').length)"
    )
    assert heat == [3] * len(METHODS)
    assert marks(page, "#stream", "#0072b2")[0] > 50
    assert page.locator("#summary tbody tr").count() == len(METHODS)
    assert page.locator("#summary td.best").count() >= 4
    # nothing sticks out: what is wide scrolls in its own box
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_method_is_switched_off_and_on_everywhere(report, opened):
    page = opened(report)
    button = page.get_by_role("button", name="special")
    before = {part: marks(page, part, "#E69F00") for part in ("#time", "#trade", "#panels")}
    assert all(before["#time"] + before["#trade"])
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    for part in before:
        assert set(marks(page, part, "#E69F00")) == {0}
        assert max(marks(page, part, "#000000")) > 0
    assert page.locator("#matrices figure:visible").count() == len(METHODS) - 1
    assert page.locator("#summary tbody tr:visible").count() == len(METHODS) - 1
    page.locator("#theme").click()  # it stays off when charts are drawn anew
    assert set(marks(page, "#time", "#E69F00")) == {0}
    page.locator("#theme").click()
    button.click()
    assert {part: marks(page, part, "#E69F00") for part in before} == before
    assert page.locator("#matrices figure:visible").count() == len(METHODS)


def test_hover_and_zoom(report, opened):
    page = opened(report)
    plot = page.locator("#time .plot").first
    plot.hover(position={"x": 200, "y": 120})
    tip = page.locator(".tip").first
    tip.wait_for()
    said = tip.inner_text()
    assert said.startswith("Round ")
    assert all(name in said for name in METHODS)
    axis = "e => [...e.querySelectorAll('text')].map(t => t.textContent).join(' ')"
    before = plot.evaluate(axis)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function(
        "([e, old]) => [...e.querySelectorAll('text')].map(t => t.textContent).join(' ') !== old",
        arg=[plot.element_handle(), before],
    )
    assert marks(page, "#time", "#E69F00")[0] == 2


def test_dark_light_and_paper(report, opened):
    page = opened(report, color_scheme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(paper) == "rgb(22, 24, 27)"
    assert min(marks(page, "#time", "#ffffff")) == 2  # black on dark paper would not be seen
    page.locator("#theme").click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    assert min(marks(page, "#time", "#000000")) == 2
    page.locator("#theme").click()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert min(marks(page, "#time", "#000000")) == 2
    assert page.locator("#time svg").first.evaluate("e => e.clientWidth") < 400  # two a row
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(paper) == "rgb(22, 24, 27)"


def test_the_streams_views(report, opened):
    page = opened(report)
    whole = marks(page, "#stream", "#0072b2")[0]
    page.locator("#stream select").select_option(label="samples of each client")
    assert 0 < marks(page, "#stream", "#0072b2")[0] <= 3 * 8  # cohorts of three, eight rounds
    page.locator("#stream select").select_option(label="classes of client 0")
    assert 0 < marks(page, "#stream", "#0072b2")[0] < whole
    page.locator("#stream .plot").hover(position={"x": 300, "y": 100})


@pytest.mark.parametrize("size", list(SIZES))
def test_hostile_names_are_text(runs, tmp_path, opened, size):
    """Names from configurations and records are shown, never run, wherever they appear."""
    folders = []
    for k, source in enumerate(runs):
        place = tmp_path / f"<b>{k}'&"
        place.mkdir()
        about = json.loads((source / "config.json").read_text())
        about["method"]["name"] = EVIL[k // 2]
        about["tasks"] = [EVIL[3], EVIL[4]]
        about["data"] = EVIL[1]
        about["everfed"] = EVIL[0]
        (place / "config.json").write_text(json.dumps(about))
        records = (source / "records.jsonl").read_text()
        more = {"round": 1, "task": 0, "metric": EVIL[1], "value": 1.0}
        (place / "records.jsonl").write_text(records + json.dumps(more) + '\n{"metric": "<i>')
        folders.append(place)
    path = tmp_path / "report.html"
    path.write_text(render(gather(collect(folders))))
    page = opened(path, size)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main b:not(.tip b), i:not(.tip i), main script").count() == 0
    heads = page.locator("#summary tbody td:first-child").all_inner_texts()
    assert heads == [" ".join(name.split()) for name in EVIL[:3]]
    assert EVIL[0] in page.locator("h1").inner_text()
    assert page.locator("#panels figcaption", has_text=EVIL[1]).count() == 1
    for plot in page.locator(".plot:visible").all():
        plot.hover(position={"x": 120, "y": 80})
    assert page.locator(".tip", has_text=EVIL[1]).count() > 0
    for button in page.locator("#methods button").all():
        button.click()
    assert "half-written" in page.locator("#notes").inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
