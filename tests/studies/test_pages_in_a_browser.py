"""Pages in a real browser: they load without an error, charts are there, tables sort.

Screenshots are kept in build/screenshots.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from drawn_study import drawn_study
from local_page_client import CONFIG

from zsim.cli.main import answer
from zsim.files.html_page import render
from zsim_plan.page import search_process, setting_search
from zsim_plan.page.local_page import LocalServer
from zsim_study.page.study_page import study_page

pytestmark = [
    pytest.mark.studies,
    pytest.mark.skipif(
        shutil.which("chromedriver") is None, reason="needs Chromium and chromedriver"
    ),
]

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDTH = 1280
NARROW = 400
"""Pixels across a telephone."""
BYTES_MAX = 1_500_000
PATIENCE_S = 30.0
"""Until the timeline of a page is unpacked and laid out."""
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
"""Nothing is fetched: no name is resolved."""

Opened = Callable[[Path], Any]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Opens a page in a browser, and returns what drives that."""
    webdriver = import_module("selenium.webdriver")
    waiting = import_module("selenium.webdriver.support.ui")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    if os.geteuid() == 0:  # Chromium's sandbox does not run as root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)

    def open_page(path: Path) -> Any:  # noqa: ANN401  (selenium is typed in part)
        driver.set_window_size(WIDTH, 1000)
        driver.get(path.as_uri())
        waiting.WebDriverWait(driver, PATIENCE_S).until(
            lambda driver: driver.execute_script(
                "return !document.querySelector('.figure')"
                " || document.documentElement.dataset.drawn === 'yes'"
            )
        )
        height = driver.execute_script("return document.documentElement.scrollHeight")
        driver.set_window_size(WIDTH, min(height + 140, 6000))
        return driver

    yield open_page
    driver.quit()


def keep(driver: Any, name: str) -> None:  # noqa: ANN401  (selenium is typed in part)
    SHOTS.mkdir(parents=True, exist_ok=True)
    assert driver.save_screenshot(str(SHOTS / f"{name}.png"))


def all_is_well(driver: Any, name: str) -> None:  # noqa: ANN401  (selenium is typed in part)
    """No error in the console, nothing fetched, figures drawn, nothing wider than a narrow page."""
    figures = driver.execute_script("return document.querySelectorAll('.figure').length")
    seen = (
        "return [...document.querySelectorAll('.figure')].filter(figure => [...figure"
        ".querySelectorAll('svg')].filter(svg => svg.clientHeight > 0).length === 1).length"
    )
    assert 0 < figures == driver.execute_script(seen)
    named = driver.execute_script("return document.querySelectorAll('.legend button').length")
    assert named > 1
    outside = (
        "return [...document.querySelectorAll('main *')].filter(each => "
        "each.getBoundingClientRect().right > innerWidth + 1 "
        "&& !each.closest('.scroll, .picture, pre')).map(each => each.outerHTML.slice(0, 200))"
    )
    waiting = import_module("selenium.webdriver.support.ui").WebDriverWait(driver, PATIENCE_S)
    for width in (WIDTH, NARROW):
        screen = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width == NARROW}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        waiting.until(lambda driver: driver.execute_script(outside) == [])
        assert driver.execute_script(seen) == figures
        keep(driver, f"{name}_{width}")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert driver.get_log("browser") == []
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("scenario", ["zero_100b", "llama2_7b", "infinity_1t"])
def test_the_page_of_a_run(scenario: str, opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert answer(["run", scenario, "--report", str(path)]) == 0
    assert path.stat().st_size < BYTES_MAX
    driver = opened(path)
    all_is_well(driver, f"run_{scenario}")
    bars = "return document.querySelectorAll('.zoom rect[data-at][x]').length"
    assert driver.execute_script(bars) > 100
    fabric = "return document.querySelectorAll('section:nth-of-type(4) .picture svg').length"
    assert driver.execute_script(fabric) == 1


def page_of_a_run(tmp_path: Path) -> Path:
    path = tmp_path / "run.html"
    assert answer(["run", "tiny", "--set", "zero.stage=3", "--report", str(path)]) == 0
    return path


def test_a_series_stands_out_when_its_name_is_pressed(opened: Opened, tmp_path: Path) -> None:
    driver = opened(page_of_a_run(tmp_path))
    count = "return document.querySelectorAll('.figure:has(.zoom) .faint').length"
    groups = (
        "return document.querySelectorAll('.zoom [data-series]:not([data-series=\"0\"])').length"
    )
    click = "document.querySelector('.figure:has(.zoom) .legend button').click()"
    for expected in (driver.execute_script(groups), 0):
        driver.execute_script(click)
        assert driver.execute_script(count) == expected


def test_a_part_of_the_timeline_can_be_looked_at(opened: Opened, tmp_path: Path) -> None:
    driver = opened(page_of_a_run(tmp_path))
    waiting = import_module("selenium.webdriver.support.ui").WebDriverWait(driver, PATIENCE_S)
    actions = import_module("selenium.webdriver").ActionChains
    shown = (
        "return [...document.querySelectorAll('.zoom rect[data-at]')]"
        ".filter(each => each.style.display !== 'none').length"
    )
    every = driver.execute_script(shown)
    svg = driver.find_element("css selector", ".zoom svg")
    drag = actions(driver).move_to_element_with_offset(svg, -100, 0).click_and_hold()
    drag.move_by_offset(80, 0).release().perform()
    waiting.until(lambda driver: 0 < driver.execute_script(shown) < every)
    actions(driver).double_click(svg).perform()
    waiting.until(lambda driver: driver.execute_script(shown) == every)
    buttons = driver.find_elements("css selector", ".zoom-buttons button")
    for button, condition in ((buttons[0], 1), (buttons[-1], 0)):
        button.click()
        waiting.until(lambda driver, few=condition: (driver.execute_script(shown) < every) == few)
    bar = driver.find_element("css selector", ".zoom g[data-sort=gather] rect")
    actions(driver).move_to_element(bar).perform()
    tip = driver.find_element("css selector", ".tip").text
    assert re.fullmatch(r"gather of .+: [\d.]+ [mu]s", tip)


def test_a_page_is_dark_where_the_reader_asks_for_it(opened: Opened, tmp_path: Path) -> None:
    driver = opened(page_of_a_run(tmp_path))
    paper = "return getComputedStyle(document.querySelector('.wide svg > rect')).fill"
    assert driver.execute_script(paper) == "rgb(255, 255, 255)"
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    body = "return getComputedStyle(document.querySelector('main')).backgroundColor"
    assert driver.execute_script(paper) == driver.execute_script(body) != "rgb(255, 255, 255)"
    pale = (
        "return [...document.querySelectorAll('svg text:not(.on)')].filter(each => "
        "getComputedStyle(each).fill === 'rgb(31, 41, 51)').length"
    )
    assert driver.execute_script(pale) == 0
    all_is_well(driver, "run_dark")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_of_a_study(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "study.html"
    path.write_text(render(study_page(drawn_study((3, 4, 2), 7, error=0.05))), "utf-8")
    driver = opened(path)
    column = "return [...document.querySelectorAll('tbody tr')].map(row => row.cells[4].dataset)"
    head = driver.execute_script("return document.querySelectorAll('th button')[4]")
    for direction in ("ascending", "descending"):
        head.click()
        values = [float(each["value"]) for each in driver.execute_script(column) if each]
        assert values == sorted(values, reverse=direction == "descending")
        sort = "return document.querySelectorAll('th')[4].getAttribute('aria-sort')"
        assert driver.execute_script(sort) == direction
    all_is_well(driver, "study")


def test_two_runs_that_differ_by_less_than_the_error_say_so(opened: Opened, tmp_path: Path) -> None:
    for error, words in (
        (0.9, "it says nothing"),
        (1e-6, "more than the error"),
        (None, "the error of this ratio is unknown"),
    ):
        path = tmp_path / f"{error}.html"
        path.write_text(render(study_page(drawn_study((5,), 3, full=0, error=error))), "utf-8")
        driver = opened(path)
        verdict = "return document.querySelector('.verdict').textContent"
        assert words in driver.execute_script(verdict)
        choose = "const [, b] = document.querySelectorAll('.pairs select'); b.value = 0;"
        driver.execute_script(f"{choose} b.dispatchEvent(new Event('change'))")
        assert "B takes as long as A" in driver.execute_script(verdict)


@pytest.fixture
def local() -> Iterator[str]:
    """Serves the local page, and returns its address."""
    server = LocalServer(0)
    thread = Thread(target=server.run)
    thread.start()
    yield server.address
    server.stop()
    thread.join()


def test_the_local_page_answers_as_choices_are_changed(local: str, opened: Opened) -> None:
    driver = opened(Path("/dev/null"))
    waiting = import_module("selenium.webdriver.support.ui").WebDriverWait(driver, PATIENCE_S)
    first = "model=gpt2&count=8&accumulate=1"
    driver.get(f"{local}?{first}")
    headline = "return document.querySelector('.answer').textContent"
    assert driver.execute_script(headline).startswith("gpt2 fits.")

    def choose(name: str, value: str, words: str) -> None:
        """Change a field; wait until the answer says `words`."""
        change = (
            "const field = document.querySelector(`[name=${arguments[0]}]`);"
            "field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        driver.execute_script(change, name, value)
        shown = "return document.getElementById('answer').textContent"
        waiting.until(lambda driver: words in driver.execute_script(shown))

    choose("model", "gpt2-medium", "gpt2-medium fits.")
    assert "model=gpt2-medium" in driver.current_url
    choose("price", "2.5", "GPU hours; ")
    choose("count", "12", "Number of GPUs: 12 must be at most 8, or a multiple of it")
    choose("count", "16", "tokens: ")
    choose("gpu", "4090", "gpt2-medium fits.")
    for name, value, words in (
        ("count", "4", "4 GPUs"),
        ("checkpointing", "none", "gpt2-medium fits."),
        ("micro", "32", "it would fit with"),  # looked for after the answer is there
    ):
        choose(name, value, words)
    page = driver.execute_script("return document.querySelector('#answer a').href")
    assert page.startswith(f"{local}report.html?model=gpt2-medium")
    for width in (400, WIDTH):
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        keep(driver, f"serve_{width}")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.get(page)
    waiting.until(
        lambda driver: driver.execute_script("return !!document.querySelector('.figure svg')")
    )
    assert driver.get_log("browser") == []


SEARCH_S = 120.0
"""Until the process of a search has started and answered, on a busy machine."""
SLEEPS = "import time; print('{\"done\": [1, 4]}', flush=True); time.sleep(600)"


def fits_the_screen(driver: Any, name: str) -> None:  # noqa: ANN401  (selenium is typed in part)
    """Nothing is wider than a telephone or a desktop; every field has a label on its line."""
    outside = (
        "return [...document.querySelectorAll('main *')].filter(each => each.checkVisibility() && "
        "each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('.scroll, pre, svg'))"
        ".map(each => each.outerHTML.slice(0, 200))"
    )
    unlabelled = (
        "return [...document.querySelectorAll('form select, form input:not([type=file])')]"
        ".filter(each => each.checkVisibility()).filter(each => {"
        "const [label] = each.labels, at = each.getBoundingClientRect();"
        "const its = label.getBoundingClientRect();"
        "return its.right > at.left + 1 || its.bottom < at.top || its.top > at.bottom;"
        "}).map(each => each.name)"
    )
    for width in (NARROW, WIDTH):
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width == NARROW}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert driver.execute_script(outside) == []
        assert driver.execute_script(unlabelled) == []
        height = driver.execute_script("return document.documentElement.scrollHeight")
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "height": min(height, 4000)}
        )
        keep(driver, f"{name}_{width}")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def text_of(driver: Any, place: str) -> str:  # noqa: ANN401  (selenium is typed in part)
    found = driver.execute_script(f"return document.querySelector('{place}').textContent")
    assert isinstance(found, str)
    return found


def waiting_for(driver: Any) -> Callable[[str, str], None]:  # noqa: ANN401  (as above)
    """Returns a function that waits until a place starts with words."""
    waiting = import_module("selenium.webdriver.support.ui").WebDriverWait(driver, SEARCH_S)

    def wait(place: str, words: str) -> None:
        waiting.until(lambda driver: text_of(driver, place).strip().startswith(words))

    return wait


def test_the_local_page_reads_a_config_and_draws_a_curve(
    local: str, opened: Opened, tmp_path: Path
) -> None:
    driver = opened(Path("/dev/null"))
    wait = waiting_for(driver)
    driver.get(f"{local}?model=gpt2&count=2&accumulate=2")
    driver.find_element("css selector", "form summary").click()
    config = tmp_path / "config.json"
    config.write_text(CONFIG, "utf-8")
    driver.find_element("css selector", "[data-into=config]").send_keys(str(config))
    wait("#answer", "config.json fits.")
    assert driver.execute_script("return document.querySelector('[name=model]').value") == "own"
    driver.find_element("id", "curve").click()
    wait("#work .found", "config.json on 1 to 4 GPUs")
    fits_the_screen(driver, "serve_curve")
    assert driver.get_log("browser") == []


def test_the_local_page_shows_two_answers_side_by_side(local: str, opened: Opened) -> None:
    driver = opened(Path("/dev/null"))
    wait = waiting_for(driver)
    driver.get(f"{local}?model=gpt2&count=2&accumulate=2")
    driver.find_element("id", "keep").click()
    wait("#answer", "B trains 1.00 times as many tokens a second as A")
    change = (
        "const field = document.querySelector('[name=lora]'); field.value = '8';"
        "field.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    driver.execute_script(change)
    wait("#answer section p", "LoRA: none: all parameters")
    assert "kept.lora=" in driver.current_url
    tops = "return [...document.querySelectorAll('section')].map(each => each.offsetTop)"
    first, second = driver.execute_script(tops)
    assert first == second
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    fits_the_screen(driver, "serve_compared_dark")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    shown = text_of(driver, "#answer")
    driver.get(driver.current_url)  # as somebody to whom the address was sent
    assert text_of(driver, "#answer") == shown
    driver.find_element("id", "drop").click()
    wait("#answer", "gpt2 fits.")
    assert driver.get_log("browser") == []


def test_a_search_of_the_local_page_shows_its_progress_and_is_cancelled(
    local: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = opened(Path("/dev/null"))
    wait = waiting_for(driver)
    driver.get(f"{local}?model=gpt2&count=2&accumulate=2&among=chosen")
    for program, place, words in (
        (SLEEPS, "#work [role=status]", "25 %"),
        ('print(\'{"refused": "the next one"}\')', "#work .found", "the next one"),
    ):
        monkeypatch.setattr(search_process, "COMMAND", (sys.executable, "-c", program))
        driver.find_element("id", "search").click()
        wait(place, words)
        if driver.find_element("id", "cancel").is_displayed():
            driver.find_element("id", "cancel").click()
            wait("#work .found", "The search was cancelled.")
    monkeypatch.undo()
    monkeypatch.setattr(setting_search, "OPERATIONS", 1)
    driver.find_element("id", "search").click()
    wait("#work .found", "The best: FSDP2")
    driver.find_element("css selector", ".found a").click()
    wait("#answer", "gpt2 fits.")
    assert (
        driver.execute_script("return document.querySelector('[name=runtime]').value")[:5]
        == "fsdp2"
    )
    assert driver.get_log("browser") == []
