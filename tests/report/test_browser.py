"""The report's page in a headless Chromium: clicks, filters, keys, comparing, hostile text, no network, 10,000 rollouts."""

import time

import chromium
import pytest
from made_runs import HOSTILE, rollout, run_folder

from bridge_jax.report import page

if chromium.missing():
    pytest.skip(chromium.missing(), allow_module_level=True)

OPEN = "return document.querySelector('.episode')?.dataset.number"
LIST = "return [...document.querySelectorAll('.row')].map((row) => row.querySelector('.question').textContent)"


@pytest.fixture(scope="module")
def window():
    with chromium.Page() as opened:
        yield opened


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Steps 1 to 3 of two questions and two samples (12 rollouts), and 4 questions evaluated before and after."""
    return page.write_report(run_folder(tmp_path_factory.mktemp("runs") / "demo"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return page.write_report([run_folder(folder / name, method=name) for name in ("bridge", "vt")], folder / "both.html")


def told(window, text):
    """The status line says so, soon."""
    window.until(f"return document.querySelector('#status').textContent === '{text}'", 5)


def click_row(window, place):
    """Rows are made anew whenever the list is drawn, so the one found may be gone by the time of the click."""
    from selenium.common.exceptions import StaleElementReferenceException

    for _ in range(20):
        try:
            return window.find(f"#row-{place}").click()
        except StaleElementReferenceException:
            continue
    raise AssertionError(f"row {place} does not stay")


def opened(window, number):
    window.until(f"return document.querySelector('.episode')?.dataset.number === '{number}'")


def choose(window, name, label):
    from selenium.webdriver.support.ui import Select

    Select(window.find(f"[name={name}]")).select_by_visible_text(label)


def test_it_opens_without_network_or_complaint(window, one):
    window.open(one)
    told(window, "20 of 20 episodes")
    assert window.do(OPEN) == "0"
    assert window.requests() == [f"file://{one}"]
    assert window.console() == []


def test_clicks_open_an_episode_with_its_candidates(window, one):
    window.open(one)
    click_row(window, 4)
    opened(window, 4)
    assert window.find(".row[aria-selected=true] .verdict").text == "✓"
    assert window.find(".episode h3").text == "Who wrote book 4?"
    kinds = window.do("return [...document.querySelectorAll('.block')].map((block) => block.classList[1])")
    assert kinds == ["think", "search", "candidates-of", "information", "answer"]
    assert window.text(".block.think .words") == "I look it up" and window.text(".block.answer .words") == "author 4"
    assert window.text("mark") == "author 4"  # the gold answer, in what the policy read
    rows = window.all(".candidates tbody tr")
    assert len(rows) == 8 and [len(window.all(f".badge.{name}")) for name in ("shown", "gold")] == [3, 1]
    cells = [cell.text for cell in rows[1].find_elements("css selector", "td")]
    assert [cells[0], *cells[2:]] == ["2", "0.333", "-1.5", "0.750"] and "Passage 1" in cells[1]
    widths = window.do("return [...arguments[0].querySelectorAll('.fill')].map((fill) => parseFloat(fill.style.width))", rows[1])
    assert widths == pytest.approx([33.33, 100 * 10 / 11, 75], abs=0.1)
    assert "on gold passages: p 0.333 → w 0.750" in window.text(".candidates-of .facts")
    window.find(".more").click()
    assert len(window.all(".candidates tbody tr")) == 12
    window.find("[aria-label='sort by w']").click()
    assert "Passage 1" in window.text(".candidates tbody tr") and window.find("th[aria-sort=descending]").text == "w"
    assert window.do("return location.hash") == "#rollout=4"
    assert window.console() == []


def test_filters(window, one):
    window.open(one)
    for name, label, count in (
        ("outcome", "right", 4 + 2),
        ("outcome", "wrong", 14),
        ("outcome", "no answer", 6),
        ("outcome", "all", 20),
        ("kind", "training", 12),
        ("step", "step 3", 4),
        ("outcome", "right", 2),
    ):
        choose(window, name, label)
        told(window, f"{count} of 20 episodes")
    window.find("#clear").click()
    told(window, "20 of 20 episodes")
    window.find("[name=words]").send_keys("TOWN 3")
    told(window, "2 of 20 episodes")
    assert window.do(LIST) == ["Where is town 3?"] * 2
    window.find("[name=words]").send_keys(" nowhere")
    told(window, "0 of 20 episodes")
    assert window.find("#nothing").is_displayed()
    window.find("#clear").click()
    choose(window, "dataset", "two_hop") if window.find("[name=dataset]").is_displayed() else None
    assert not window.find("[name=run]").is_displayed()  # one run: no choice
    told(window, "20 of 20 episodes")


def test_keys(window, one):
    from selenium.webdriver.common.keys import Keys

    window.open(one)
    window.press("jj")
    opened(window, 2)
    window.press("k")
    opened(window, 1)
    window.press("G")
    opened(window, 19)
    window.press("g")
    opened(window, 0)
    window.press("r")
    told(window, "6 of 20 episodes")
    window.press("j")
    opened(window, 4)
    window.press("w")
    told(window, "14 of 20 episodes")
    window.press("a/")
    window.press("town jk")  # typed, not obeyed
    told(window, "0 of 20 episodes")
    assert window.do("return document.activeElement.name") == "words"
    window.press(Keys.BACKSPACE * 3 + Keys.ENTER)
    told(window, "8 of 20 episodes")
    assert window.do("return document.activeElement.id") == "list"
    window.press(Keys.ARROW_DOWN)
    opened(window, 12)
    assert window.do("return document.activeElement.getAttribute('aria-activedescendant')") == "row-0"
    window.press("]")  # the same question after training
    opened(window, 16)
    window.press("[")
    opened(window, 12)
    window.press("?")
    assert window.find("#help").is_displayed()
    window.press("j")  # while the help is open nothing moves
    window.press("?")
    assert not window.find("#help").is_displayed() and window.do(OPEN) == "12"
    assert window.console() == []


def test_two_steps_and_two_runs_beside_each_other(window, one, two):
    def sides():
        return window.do("return [...document.querySelectorAll('.episode .where')].map((line) => line.textContent)")

    window.open(one)
    window.find("[name=words]").send_keys("town 0")
    click_row(window, 0)
    opened(window, 12)
    window.press("\ue00c" + "c")  # Escape leaves the field
    window.until("return document.querySelectorAll('.episode').length === 2")
    assert ["evaluation · step 0" in sides()[0], "evaluation · step 3" in sides()[1]] == [True, True]
    assert window.do("return location.hash") == "#rollout=12&beside=16"
    window.press("c")
    window.until("return document.querySelectorAll('.episode').length === 1")

    window.open(two)
    told(window, "40 of 40 episodes")
    click_row(window, 1)
    opened(window, 1)
    window.press("c")
    window.until("return document.querySelectorAll('.episode').length === 2")
    assert sides()[0].startswith("bridge · bridge · training · step 1 · sample 1")
    assert sides()[1].startswith("vt · vt · training · step 1 · sample 1")
    assert [len(window.all(".row.compared")), len(window.all(".episode table"))] == [0, 2]
    window.press("j")  # the one beside follows the question
    opened(window, 2)
    window.until("return document.querySelectorAll('.episode')[1].dataset.number === '22'")
    choices = window.do("return [...document.querySelectorAll('#beside optgroup')].map((group) => group.label)")
    assert choices == ["bridge: training", "vt: training"]
    choose(window, "run", "vt (vt)")
    told(window, "20 of 40 episodes")
    window.open(two, "#rollout=5&beside=24")
    assert [window.do(OPEN), len(window.all(".episode"))] == ["5", 2]
    assert not window.find("#lost").is_displayed()
    for address, open_then, said in (  # of another page, or of this one before it was written again
        ("#rollout=9999&beside=-1", "0", "rollout 9999 is not on this page. It has the rollouts 0 to 39,"),
        ("#rollout=5&beside=40", "5", "rollout 40, to be put beside it, is not on this page."),
        ("#rollout=5&beside=0", "5", "rollout 0, to be put beside it, is of another question."),
        ("#rollout=5&beside=5", "5", "rollout 5, to be put beside it, is the same."),
        ("#beside=5", "0", "no rollout is named to put another one beside."),
    ):
        window.open(two, address)
        assert (window.do(OPEN), len(window.all(".episode"))) == (open_then, 1), address
        assert f"The address does not fit: {said}" in window.text("#lost"), address
    window.do("location.hash = 'rollout=6&beside=26'")  # typed into the page that is open
    window.until("return document.querySelectorAll('.episode').length === 2")
    assert window.do(OPEN) == "6" and not window.find("#lost").is_displayed()
    window.do("location.hash = 'rollout=x'")
    window.until("return document.querySelector('#lost').textContent.includes('rollout x is not on this page')")
    assert window.do(OPEN) == "6"
    click_row(window, 2)
    window.until("return document.querySelector('#lost').hidden")
    assert window.console() == []


def test_hostile_text_is_shown_and_does_nothing(window, tmp_path):
    evil = rollout(1, 0, 0, True, text=HOSTILE)
    evil |= {"golds": [HOSTILE], "answer": HOSTILE, "dataset": HOSTILE, "id": HOSTILE, "reason": HOSTILE}
    evil["trace"] = [{"kind": kind, "text": HOSTILE} for kind in ("generated", "information", "tool", "corrective", "fault")]
    evil["turns"][0] |= {"query": HOSTILE, "error": HOSTILE}
    evil["turns"][0]["documents"][0] |= {"id": HOSTILE, "title": HOSTILE}
    folder = run_folder(
        tmp_path / "run", rollouts={1: [evil, "</script><img src=y onerror=1>"]}, steps=(1,), method=HOSTILE, name=HOSTILE
    )
    window.open(page.write_report(folder))
    assert window.do("return document.title").endswith("bridge_jax")
    assert window.all("img") == [] and window.do("return document.scripts.length") == 1 + 3
    for selector in (".episode h3", ".block.untagged .words", ".block.information .words", ".passage .title", ".row .question"):
        assert window.text(selector).strip() == HOSTILE, selector
    isolated = "return getComputedStyle(document.querySelector(arguments[0])).unicodeBidi"
    for selector in (".episode h3", ".block.information .words", ".passage .title", ".row .question", ".row .answer bdi"):
        assert window.do(isolated, selector) in ("isolate", "plaintext"), selector
    assert "line 2, was skipped" in window.text(".notes")
    assert window.console() == [] and len(window.requests()) == 1
    window.do("document.body.append(Object.assign(document.createElement('img'), {src: 'https://example.org/x.png'}))")
    window.do("const s = document.createElement('script'); s.textContent = \"document.title = 'broken'\"; document.body.append(s)")
    window.until("return document.title.endsWith('bridge_jax')")
    assert window.requests() == [] and len(window.console()) == 2  # the policy refuses both


def test_a_file_that_was_cut_off_says_so(window, one, tmp_path):
    text = one.read_text()
    at = text.index('data-part="index">') + 200
    (tmp_path / "cut.html").write_text(text[:at] + text[text.index("</script>", at) :])
    window.driver.get(f"file://{tmp_path / 'cut.html'}")
    window.until("return document.querySelector('#status').textContent.startsWith('The packed rollouts cannot be read')")


def test_curves_tell_their_values(window, one):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    window.open(one)
    reward = "//figure[figcaption='reward']"
    svg, output = (window.driver.find_element("xpath", f"{reward}/{kind}") for kind in ("*[name()='svg']", "output"))
    assert output.text == "last: 0.3"
    ActionChains(window.driver).move_to_element_with_offset(svg, -svg.size["width"] // 2 + 45, 0).perform()
    assert output.text == "step 1: 0.1"
    window.do("arguments[0].focus()", svg)
    svg.send_keys(Keys.ARROW_RIGHT)
    assert output.text == "step 2: 0.2"


def test_the_light_page_needs_no_browser_of_rollouts(window, tmp_path):
    path = page.write_report(run_folder(tmp_path / "run"), light=True)
    window.driver.get(f"file://{path}")
    assert window.text("#rollouts code").startswith("python -m bridge_jax.report") and window.console() == []


def test_ten_thousand_rollouts_stay_usable(window, tmp_path):
    """Bounds are generous: a machine of two busy cores; what is measured is in benchmarks/results/report.json."""
    rows = {
        step: [rollout(step, step * 250 + q, s, s == q % 4, candidates=4) for q in range(250) for s in range(4)]
        for step in range(10)
    }
    path = page.write_report(run_folder(tmp_path / "run", rollouts=rows, steps=tuple(range(1, 10)), group=4))
    assert window.open(path) < 15
    told(window, "10,008 of 10,008 episodes")
    assert window.do("return document.querySelectorAll('.row').length") < 40
    window.press("G")
    opened(window, 10_007)
    took = window.do(
        "const began = performance.now(), words = document.querySelector('[name=words]'); words.value = 'book 1234';"
        "words.dispatchEvent(new Event('input', {bubbles: true})); return performance.now() - began"
    )
    told(window, "4 of 10,008 episodes")
    assert took < 500
    began = time.monotonic()
    click_row(window, 0)
    opened(window, 1234 * 4)
    assert time.monotonic() - began < 5 and window.console() == []


def test_a_phone_has_list_and_rollout_in_turns(one):
    with chromium.Page(phone=True, dark=True) as phone:
        phone.open(one)
        assert phone.do("return document.documentElement.scrollWidth") == 390
        assert phone.find("#list").is_displayed() and not phone.find("#episode").is_displayed()
        click_row(phone, 2)
        opened(phone, 2)
        assert phone.find("#episode").is_displayed() and not phone.find("#list").is_displayed()
        assert phone.do("return document.documentElement.scrollWidth") == 390
        dark = phone.do("return getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(16, 19, 23)"
        phone.find(".back").click()
        assert phone.find("#list").is_displayed() and phone.console() == []
