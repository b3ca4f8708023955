"""The chat page of `surogate serve` in a browser: what is typed is sent, answers appear as they come, nothing of them is run.

The server is the real one over an engine whose answers the tests give piece by piece; one test has a model.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import pytest
import surogate
from browser import PROGRAM, Browser
from surogate.serve.engine import Done
from surogate.serve.protocol import BadRequest
from surogate.serve.server import Limits, Server
from test_generate import TEMPLATE
from test_serve import STORIES, Script, end, start

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (apt-get install chromium)"),
]

#: Texts that would run, or become elements, if they were not taken as text.
HOSTILE = (
    "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"> **bold** `code` &amp; <b>b</b>\n"
    "# heading\n[link](javascript:alert(1))\n| a | b |"
)

#: A word that no line has room for.
LONG = "x" * 400


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def engine() -> Script:
    return Script()


@pytest.fixture
def server(engine, request) -> Iterator[Server]:
    token = getattr(request, "param", None)
    made = Server(("127.0.0.1", 0), engine, Limits(1 << 20, 60, 100, 4), token)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def page(server, browser) -> Browser:
    browser.look(1280, "light", False)
    browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
    if server.token is None:
        browser.until("document.querySelectorAll('#model option').length === 2")
    return browser


def say(page: Browser, text: str) -> None:
    page.click("#text")
    page.type(text)
    page.press("Enter", 13, text="\r")


def shown(page: Browser) -> list[list[str]]:
    return page.value("[...document.querySelectorAll('.message')].map((of) => [of.className, of.textContent])")


def is_idle(page: Browser) -> None:
    page.until("document.getElementById('send').textContent === 'Send'")


def test_an_answer_appears_piece_by_piece_and_the_conversation_goes_on(page, engine):
    say(page, "Hello")
    job = engine.next()
    assert job.request.prompts[0]["messages"] == [{"role": "user", "content": "Hello"}] and job.request.model == "one"
    said = ""
    for piece in ("Good ", "day, ", "näh 🌞"):
        job.events.put((0, piece, None))
        said += piece
        page.until("document.querySelector('.assistant').textContent", lambda text, said=said: text == said)
        assert page.value("document.getElementById('send').textContent") == "Stop"
    job.events.put((0, "", "stop"))
    job.events.put(Done(1, 3))
    is_idle(page)
    page.value("document.getElementById('model').value = 'two'")
    say(page, "And?")
    second = engine.answer("Well.").request
    assert [of["content"] for of in second.prompts[0]["messages"]] == ["Hello", said, "And?"] and second.model == "two"
    is_idle(page)
    assert [text for _, text in shown(page)] == ["Hello", said, "And?", "Well."] and page.errors == []
    page.click("#reset")
    assert shown(page) == []
    say(page, "Again")
    assert len(engine.answer("Yes").request.prompts[0]["messages"]) == 1
    is_idle(page)


def test_stop_ends_the_answer_on_the_server_and_keeps_what_came(page, engine):
    say(page, "Count")
    job = engine.next()
    for number in range(3):
        job.events.put((0, f"{number} ", None))
    page.until("document.querySelector('.assistant')?.textContent === '0 1 2 '")
    page.click("#send")
    is_idle(page)
    assert job.is_cancelled.wait(10), "the server goes on"
    assert [text for _, text in shown(page)] == ["Count", "0 1 2 "] and page.errors == []
    say(page, "More")
    assert [of["content"] for of in engine.answer("3").request.prompts[0]["messages"]] == ["Count", "0 1 2 ", "More"]
    is_idle(page)


def test_a_new_conversation_ends_the_answer_that_runs(page, engine):
    say(page, "Count")
    job = engine.next()
    job.events.put((0, "0 ", None))
    page.until("document.querySelector('.assistant')?.textContent === '0 '")
    page.click("#reset")
    assert job.is_cancelled.wait(10)
    is_idle(page)
    assert shown(page) == []
    say(page, "Again")
    assert [of["content"] for of in engine.answer("Yes").request.prompts[0]["messages"]] == ["Again"]
    is_idle(page)
    assert [text for _, text in shown(page)] == ["Again", "Yes"]


def test_texts_are_shown_as_they_are_and_never_run(page, engine):
    title = page.value("document.title")
    say(page, HOSTILE.replace("\n", " "))
    engine.answer(HOSTILE[:20], HOSTILE[20:])
    is_idle(page)
    engine.refusal = HOSTILE
    say(page, "again")
    page.until("document.querySelector('.error')?.textContent")
    assert [text for _, text in shown(page)] == [HOSTILE.replace("\n", " "), HOSTILE, HOSTILE]
    assert page.value("document.querySelectorAll('#messages *').length") == 3, "no element but the messages"
    assert page.value("document.title") == title
    lines = "getComputedStyle(document.querySelector('.assistant')).whiteSpace"
    assert page.value(lines) == "pre-wrap", "lines stay lines"


def test_shift_and_enter_make_a_line_and_an_empty_message_is_not_sent(page, engine):
    page.click("#text")
    page.press("Enter", 13, text="\r")
    page.type("one")
    page.press("Enter", 13, modifiers=8, text="\r")
    page.type("two")
    page.press("Enter", 13, text="\r")
    assert engine.answer("ok").request.prompts[0]["messages"][0]["content"] == "one\ntwo"
    is_idle(page)
    assert engine.jobs.empty() and page.value("document.activeElement.id") == "text"


def test_a_refused_message_is_back_in_the_field(page, engine):
    engine.refusal = "the prompt has too many tokens"
    say(page, "a long message")
    page.until("document.querySelector('.error')?.textContent")
    is_idle(page)
    assert page.value("document.getElementById('text').value") == "a long message"
    assert shown(page) == [["message error", engine.refusal]], "the conversation is what the model is asked with"
    engine.refusal = None
    page.press("Enter", 13, text="\r")
    assert len(engine.answer("ok").request.prompts[0]["messages"]) == 1
    is_idle(page)
    assert [text for _, text in shown(page)] == ["a long message", "ok"]


def test_an_answer_that_breaks_off_keeps_what_came_and_says_why(page, engine):
    say(page, "Hello")
    job = engine.next()
    job.events.put((0, "Good", None))
    page.until("document.querySelector('.assistant')?.textContent === 'Good'")
    job.events.put(BadRequest("the device is gone", status=500))
    page.until("document.querySelector('.error')?.textContent === 'the device is gone'")
    is_idle(page)
    assert [text for _, text in shown(page)] == ["Hello", "Good", "the device is gone"]


@pytest.mark.parametrize("server", ["a-token-of-some-length"], indirect=True)
def test_a_token_is_asked_for_where_one_is_needed(page, engine):
    page.until("document.querySelector('.error')?.textContent", lambda text: text and "token" in text)
    page.click("#token")
    page.type("a-token-of-some-length")
    page.press("Tab", 9)
    page.until("document.querySelectorAll('#model option').length === 2")
    say(page, "Hello")
    engine.answer("Hi")
    is_idle(page)
    assert shown(page)[-1] == ["message assistant", "Hi"]


#: The contrast of an element's text with its background, as WCAG 2 defines it.
CONTRAST = """
(selector) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (layers) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const color of layers) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const colors = [];
  const of = document.querySelector(selector);
  for (let at = of; at; at = at.parentElement) colors.unshift(getComputedStyle(at).backgroundColor);
  const probe = document.createElement("div");
  probe.style.background = "Canvas";
  document.body.append(probe);
  colors.unshift(getComputedStyle(probe).backgroundColor);
  probe.remove();
  const [a, b] = [light(over([...colors, getComputedStyle(of).color])), light(over(colors))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_its_window_and_can_be_read(page, engine, scheme, width):
    engine.models = ["a-name-that-is-as-long-as-names-of-checkpoints-and-adapters-may-become-in-practice", "two"]
    page.look(width, scheme, width < 500)
    page.call("Page.reload")
    page.until("document.querySelectorAll('#model option').length === 2")
    say(page, LONG)
    engine.answer(LONG, "\n" + "    code " * 60, "\n" + "line\n" * 60)
    is_idle(page)
    engine.refusal = LONG
    say(page, "again")
    page.until("document.querySelector('.error')?.textContent")
    assert page.value("document.documentElement.scrollWidth") <= page.value("innerWidth")
    outside = "[...document.querySelectorAll('body *')].filter((of) => of.getBoundingClientRect().right > innerWidth + 1)"
    assert page.value(f"{outside}.map((of) => of.tagName + '#' + of.id)") == []
    field = "(() => { const of = document.getElementById('send').getBoundingClientRect(); return of.bottom <= innerHeight; })()"
    assert page.value(field), "the field stays in the window, however long the conversation is"
    for of in (".user", ".assistant", ".error", "h1", "label", "#send", "#text"):
        assert page.value(f"({CONTRAST})({of!r})") >= 4.5, (scheme, of)
    background = page.value("getComputedStyle(document.documentElement).colorScheme")
    assert background == "light dark"
    dark = page.value("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (scheme == "dark")


def test_a_model_answers_in_the_browser(browser, tmp_path):
    folder = tmp_path / "talkative"
    shutil.copytree(STORIES, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    expected = surogate.load(folder).generate([{"role": "user", "content": "Once upon a time"}], max_new_tokens=30)
    process, address = start(folder, "--max-tokens", 30)
    try:
        browser.open(address.removesuffix("v1"))
        browser.until("document.querySelectorAll('#model option').length === 1")
        say(browser, "Once upon a time")
        browser.until("document.querySelector('.assistant')?.textContent")
        is_idle(browser)
    finally:
        assert end(process) == 0
    assert shown(browser) == [["message user", "Once upon a time"], ["message assistant", expected]]
