"""The report: what stands on the page, that the page is whole and loads nothing, and the comparison of runs."""

from __future__ import annotations

import itertools
import json
import re
import time
from html.parser import HTMLParser

import pytest
from conftest import REPOSITORY
from surogate.cli.commands import main
from surogate.logs.stream import History, Stream, history_of, log_of
from surogate.logs.thinned import Thinned
from surogate.report import LiveReport, page, shape, state
from surogate.report.charts import Chart, Line
from surogate.report.series import Axis, short, smoothed, thinned
from surogate.report.words import bytes_text, duration

VOID = {"meta", "br", "wbr", "path", "link", "img", "input"}


def opening(step: int = 0, **changes) -> dict:
    manifest = {
        "run": "a <b>run</b>",
        "run_id": "1",
        "steps": 10,
        "model": "m",
        "machine": {"name": "cpu", "memory": 1 << 34},
    }
    memory = [
        {"class": "weights", "bytes": 3 << 20, "note": "base"},
        {"class": "activations", "bytes": 1 << 20, "note": ""},
    ]
    return {
        "event": "resume" if step else "start",
        "time": "2026-01-01T00:00:00Z",
        "step": step,
        "manifest": manifest,
        "options": {"model": "m", "learning_rate": 0.1, "max_grad_norm": 1.0, "device": "cpu"},
        "given": ["model", "learning_rate"],
        "because": {"device": "no GPU"},
        "plan": {"memory": memory, "activations": [], "phases": [], "decisions": [], "machine_memory": 1 << 34},
        "data": {
            "datasets": [
                {
                    "name": "set.jsonl",
                    "rows_read": 12345,
                    "rows_kept": 12000,
                    "documents": 12000,
                    "tokens": 1000,
                    "trained_tokens": 250,
                    "longest": 9,
                    "dropped": [{"reason": "too long", "rows": 345, "example": "set.jsonl:7: <script>"}],
                }
            ],
            "documents": 1,
            "held_out": 1,
            "rows": 1,
            "row_tokens": 8,
            "micro_batches": 1,
            "layout": "packed",
            "fill": 0.5,
        },
        **changes,
    }


def step(number: int, loss: float | None = None, **changes) -> dict:
    loss = 5 / (1 + number) if loss is None else loss
    return {
        "event": "step",
        "time": "2026-01-01T00:00:01Z",
        "step": number,
        "loss": loss,
        "grad_norm": 0.5 * loss,
        "learning_rate": 0.1,
        "tokens": 100,
        "seconds": 0.5,
        "tokens_per_second": 200.0,
        "mfu": 0.4,
        "ceiling": 0.6,
        "memory": 2 << 20,
        **changes,
    }


def history(*events: dict) -> History:
    made = History()
    for event in events:
        made.take(event)
    return made


class Whole(HTMLParser):
    """Every element is closed, in order; nothing is loaded from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(text: str) -> None:
    whole = Whole()
    whole.feed(text)
    assert not whole.open and all(of.startswith("data:image/jpeg;base64,") for of in whole.loads)
    assert not re.search(r"https?://|@import|url\(", text)


def test_a_page_says_what_there_is_to_know():
    events = [opening(), *[step(i) for i in range(5)], {"event": "evaluation", "step": 5, "loss": 1.25}]
    text = page.render(history(*events), is_running=True, refresh=10)
    check(text)
    for words in (
        "Loss",
        "Gradient norm",
        "clipped above 1",
        "Learning rate",
        "Throughput",
        "40.0 % MFU",
        "60.0 % of the ceiling",
        "1.2500",
        "best evaluation, after 5 steps",
        "3.0 MiB",
        "4.0 MiB of 16.0 GiB",
        "12\u202f345",
        "25.0 %",
        "345 × too long",
        "no GPU",
        'data-refresh="10"',
        'class="chip running"',
        "a &lt;b&gt;run&lt;/b&gt;",
        "set.jsonl:7: &lt;script&gt;",
    ):
        assert words in text, words
    assert "<script>)" not in text


@pytest.mark.parametrize("kind", ["finished", "interrupted", "failed"])
def test_a_run_that_has_ended_says_how(kind):
    end = {"event": kind, "time": "2026-01-01T00:00:02Z", "error": "the disk is full", "result": "r", "checkpoint": "c"}
    text = page.render(history(opening(), step(0), end))
    check(text)
    assert f'class="chip {kind}"' in text and 'data-refresh="0"' in text
    assert ("the disk is full" in text) == (kind == "failed")
    assert 'class="chip silent"' in page.render(history(opening(), step(0)))


def test_a_page_of_a_run_without_a_step_or_a_number_is_whole():
    check(page.render(history(opening(data=None, plan={}))))
    check(page.render(history(opening(), step(0, float("nan"), grad_norm=None, mfu=None, memory=None))))


def test_steps_that_are_done_again_stand_there_once(tmp_path):
    log = tmp_path / "log-a.json"
    first = [opening(), *[step(i, 1.0) for i in range(5)], {"event": "evaluation", "step": 4, "loss": 1}]
    log.write_text("".join(json.dumps(event) + "\n" for event in first) + '{"event": "st')
    stream, seen = Stream(log), History()
    for event in stream.read():
        seen.take(event)
    assert (seen.done, seen.evaluations.keys()) == (5, {4})
    # The next process cuts off what is not whole.
    again = [opening(3), step(3, 2.0)]
    log.write_text("".join(json.dumps(event) + "\n" for event in [*first, *again]))
    for event in stream.read():
        seen.take(event)
    assert [of["loss"] for of in seen.steps.values()] == [1, 1, 1, 2] and not seen.evaluations
    assert stream.read() == [] and seen.since == 3
    assert history_of(log).steps == seen.steps and log_of(tmp_path) == log


def test_answers_to_prompts_stand_on_the_page_the_last_ones_first():
    def answers(at: int, text: str) -> dict:
        sample = {"prompt": "Once <b>", "text": text, "finish": "length", "tokens": 3}
        return {"event": "samples", "step": at, "samples": [sample]}

    text = page.render(history(opening(), step(0), answers(1, "an early one"), step(1), answers(2, "a late <i>one")))
    check(text)
    assert "Once &lt;b&gt;" in text and "a late &lt;i&gt;one" in text and "Earlier (1)" in text
    assert text.index("a late") < text.index("an early one")
    assert "<h2>Samples" not in page.render(history(opening(), step(0)))
    again = history(opening(), answers(4, "done again"), opening(2))
    assert not again.samples


def test_images_of_prompts_stand_beside_them_and_nothing_else_does():
    def answers(at: int, **copy: str) -> dict:
        image = {"name": "a<b>.png", "width": 4, "height": 3, "tokens": 2, **copy}
        sample = {"prompt": "<image>", "text": "it", "finish": "end", "tokens": 3, "images": [image]}
        return {"event": "samples", "step": at, "samples": [sample]}

    copy = "data:image/jpeg;base64,/9j/4AAQ+w=="
    text = page.render(history(opening(), answers(1, copy=copy), step(1), answers(2)))
    check(text)
    assert text.count(f'<img src="{copy}" alt="a&lt;b&gt;.png, 4 × 3 pixels, 2 tokens"') == 2
    for wrong in ("http://a/b.jpg", f'{copy}" onload="x', "javascript:1", "data:text/html;base64,AAAA"):
        text = page.render(history(opening(), answers(1, copy=wrong)))
        assert "<img" not in text and wrong not in text and "a&lt;b&gt;.png, 4 × 3 pixels, 2 tokens" in text
    other = "data:image/jpeg;base64,AAAA"
    text = page.render(history(opening(), answers(1, copy=copy), opening(1), answers(2, copy=other), answers(3)))
    assert text.count(f'src="{copy}"') == 1 and text.count(f'src="{other}"') == 2, "a resumed run may show another image"
    many = history(opening(), *(answers(at, **({"copy": copy} if at == 20 else {})) for at in range(1, 60)))
    assert len(many.samples) == 40 and page.render(many).count(f'src="{copy}"') > 1, "a copy outlives its event"
    assert shape.problem(answers(1, copy=7)) == "`samples[0].images[0].copy` is 7, expected a text"


def test_a_long_run_is_a_small_page_that_is_written_fast():
    long = history(opening(), *[step(i, 5 - i / 1e5 + (i % 7)) for i in range(100_000)])
    begin = time.process_time()
    text = page.render(long)
    assert time.process_time() - begin < 5 and len(text) < 600_000
    peaks = thinned([(i, 100.0 if i == 54_321 else 0.0) for i in range(100_000)])
    assert (54_321, 100.0) in peaks and len(peaks) <= 800
    assert smoothed([(i, 3.0) for i in range(1000)])[-1] == (999, pytest.approx(3.0))


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0, 1, False), (2.31, 2.32, False), (-5, 900, False), (0.02, 50, True), (3, 3, False)]
)
def test_axes_have_a_few_marks_around_the_values(low, high, log):
    axis = Axis(low, high, log)
    assert 2 <= len(axis.marks) <= 8
    assert 0 <= axis.place(low) <= axis.place(high) <= 1
    assert len({short(mark) for mark in axis.marks}) == len(axis.marks)


@pytest.mark.parametrize(("low", "high"), [(0.71, 0.98), (0.2, 3.0), (1.0, 1.0), (2e-4, 7e-4)])
def test_a_logarithmic_axis_has_room_and_marks_around_the_values(low, high):
    axis = Axis(low, high, log=True)
    assert 0.005 < axis.place(low) <= axis.place(high) < 0.995
    assert axis.marks[0] <= low and high <= axis.marks[-1]


def test_steps_are_counted_from_0_as_on_the_console():
    charts = {chart.title: chart for chart in page.charts(history(opening(), step(0), step(1)))}
    for title in ("Loss", "Gradient norm", "Learning rate", "Throughput"):
        assert [x for x, _ in charts[title].lines[0].points] == [0, 1], title
    event = {"event": "device", "step": 1, "utilization": 0.5, "memory_used": 1 << 30}
    charts = {chart.title: chart for chart in page.charts(history(opening(), step(0), step(1), event))}
    assert [x for x, _ in charts["Memory in use"].lines[0].points] == [1]


def test_the_tile_of_the_loss_says_what_it_is_a_mean_of():
    losses = [9.0] * 15 + [1.0, 2.0, 3.0, 4.0, 5.0]
    text = page.tiles(history(opening(), *[step(i, loss) for i, loss in enumerate(losses)]))
    assert "<b>3.0000</b><small>loss, mean of the last 5 steps</small>" in text
    text = page.tiles(history(opening(), step(0, 2.0), {"event": "evaluation", "step": 1, "loss": 1.0}))
    assert "<b>2.0000</b><small>loss, mean of the last 1 step</small>" in text
    assert "best evaluation, after 1 step<" in text


def test_what_differs_by_its_nature_is_no_difference_and_names_are_short(tmp_path, capsys):
    places = []
    for name, value in (("a", True), ("b", False)):
        place = tmp_path / name / "output"
        place.mkdir(parents=True)
        options = {"model": "m", "learning_rate": 0.1, "resume_from_checkpoint": value, "output_dir": name}
        events = [opening(options=options), step(0)]
        (place / "log-1.json").write_text("".join(json.dumps(event) + "\n" for event in events))
        places.append(str(place))
    assert main(["report", *places, "--output", str(tmp_path / "both.html")]) == 0
    text = (tmp_path / "both.html").read_text()
    assert "All options are the same." in text
    assert ">a/output<" in text and ">b/output<" in text and str(tmp_path) not in text


def test_numbers_are_short():
    assert [short(x) for x in (0, 0.0003, 2.5, 12_000, 3.4e6, 1500, 0.5)] == [
        "0",
        "3e-4",
        "2.5",
        "12k",
        "3.4M",
        "1500",
        "0.5",
    ]
    assert [duration(s) for s in (2, 42, 187, 7500, 100_000)] == ["2.0 s", "42 s", "3:07 min", "2:05 h", "1 d 3 h"]
    assert [bytes_text(b) for b in (5, 2048, 5 << 20, 140 << 30)] == ["5 B", "2.0 KiB", "5.0 MiB", "140 GiB"]


def test_runs_stand_beside_each_other(tmp_path, capsys):
    for name, rate in (("one", 0.1), ("two", 0.2)):
        (tmp_path / name).mkdir()
        first = opening(options={"learning_rate": rate, "model": "m"})
        first["manifest"]["run"] = name
        events = [first, *[step(i, rate + i) for i in range(40)]]
        (tmp_path / name / "log-x.json").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["report", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one" / "report.html").is_file()
    out = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(out)]) == 0
    text = out.read_text()
    check(text)
    assert "Options that differ" in text and "<code>learning_rate</code>" in text and "<code>model</code>" not in text
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "one" / "report.html"), str(out)]
    (tmp_path / "none").mkdir()
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "there is no log of a run here" in capsys.readouterr().err


def test_a_long_run_is_kept_in_little_memory_and_its_peaks_stay(tmp_path):
    steps, spike = 300_000, 123_457
    log = tmp_path / "log-a.json"
    with log.open("w") as file:
        file.write(json.dumps(opening()) + "\n")
        for i in range(steps):
            loss = 9.0 if i == spike else 3.0 + (i % 10) / 100
            file.write(json.dumps(step(i, loss, seconds=0.25)) + "\n")
            if i % 100 == 99:
                file.write(json.dumps({"event": "checkpoint", "time": "t", "step": i, "path": f"c/{i}"}) + "\n")
    seen = history_of(log)
    kept = list(seen.steps.values())
    assert len(kept) < 60_000 and len(seen.marks) <= 200
    assert (seen.done, seen.steps.count, seen.steps.seconds) == (steps, steps, pytest.approx(steps / 4))
    assert max(of["loss"] for of in kept) == 9.0 and seen.steps.last["step"] == steps - 1
    text = page.render(seen)
    assert len(text) < 400_000 and "300\u202f000" in text
    listed = state.trainer_state(seen)
    assert listed["global_step"] == steps and len(listed["log_history"]) < 10_000
    strides = {b["step"] - a["step"] for a, b in itertools.pairwise(listed["log_history"][:-1])}
    assert strides == {listed["logging_steps"]}


def test_a_thinned_series_is_whole_until_it_is_long():
    series = Thinned(windows=8)
    for i in range(8):
        series.add(i, {"step": i, "loss": float(i), "seconds": 1.0, "memory": i, "note": "a text"})
    assert [of["step"] for of in series.values()] == list(range(8)) and series.stride == 1
    assert "note" not in series.last
    for i in range(8, 64):
        series.add(i, {"step": i, "loss": float(i % 5), "seconds": 1.0, "memory": 1})
    assert (series.stride, series.count, series.seconds, series.memory) == (8, 64, 64.0, 7)
    assert [of["step"] for of in series.regular()] == list(range(0, 64, 8))
    # A run that goes back to its checkpoint does the steps after it again.
    series.cut(20)
    assert (series.count, series.seconds, series.last["step"]) == (20, 20.0, series.last["step"])
    assert max(series.keys()) < 20
    series.cut(0)
    assert not series and series.last is None and series.count == 0


def test_a_tracker_begins_with_the_last_process(tmp_path):
    log = tmp_path / "log-a.json"
    events = [opening(), step(0), step(1), opening(step=1), step(1), step(2)]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    stream = Stream(log)
    stream.go_to_last_opening()
    assert [(of["event"], of["step"]) for of in stream.read()] == [("resume", 1), ("step", 1), ("step", 2)]
    assert stream.read() == []


def test_only_pages_of_its_own_are_replaced(tmp_path, capsys, monkeypatch):
    log = tmp_path / "log-a.json"
    log.write_text("".join(json.dumps(event) + "\n" for event in [opening(), step(0)]))
    for name, text in [("notes.html", "<html>important</html>"), ("empty.html", ""), ("link.html", None)]:
        path = tmp_path / name
        path.write_text(text) if text is not None else path.symlink_to(tmp_path / "notes.html")
        assert main(["report", str(tmp_path), "--output", str(path)]) == 1
        assert "only a page of surogate is replaced" in capsys.readouterr().err
        assert path.read_text() == (text if text is not None else "<html>important</html>")
    page_of_its_own = tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(tmp_path), "--output", str(page_of_its_own)]) == 0
    assert not list(tmp_path.glob(".page.html*"))
    # Nor is a state of transformers' own trainer.
    made = history(opening(), step(0))
    theirs = tmp_path / "trainer_state.json"
    theirs.write_text('{"total_flos": 1, "log_history": []}')
    with pytest.raises(FileExistsError):
        state.replace(theirs, made)
    theirs.unlink()
    state.replace(theirs, made)
    state.replace(theirs, made)
    # A comparison has its place in the working directory.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "comparison.html").write_text("mine")
    assert main(["report", str(tmp_path), str(log)]) == 1 and (tmp_path / "comparison.html").read_text() == "mine"


def test_a_state_is_written_where_this_process_has_its_checkpoints(tmp_path):
    """The log may come from a folder of another name, or from another machine."""
    before, here = tmp_path / "before", tmp_path / "here"
    said: list[str] = []
    for folder in (before, here):
        folder.mkdir()
    events = []
    for at, folder in enumerate((before, here)):
        begin = opening(step=at)
        begin["manifest"]["output"] = str(folder)
        path = str(folder / f"checkpoint-{at + 1}")
        events += [begin, step(at), {"event": "checkpoint", "time": begin["time"], "step": at + 1, "path": path}]
    live = LiveReport(here, said.append)
    live.take(events[:3])
    live.take(events[3:])
    assert [path.name for path in before.iterdir()] == [] and (here / "trainer_state.json").is_file() and said == []


def test_rows_of_wide_tables_are_stacked_on_narrow_screens():
    from surogate.report.words import pairs, table

    wide = table(["dataset", "rows", "tokens", "dropped"], [["a<b>", "1", "2", "none"]], ["v", "n", "n"])
    assert '<table class="stacked">' in wide and '<td class="v">a<b></td><td class="n" data-l="rows">1</td>' in wide
    assert "data-l" not in table(["option", "value", ""], [["lora", "true", "why"]])
    # A bar's colours need their column, and names with values are short.
    assert "stacked" not in table(["", "bytes", "share"], [["weights", "1 MiB", "3 %"]]) + pairs([("a", "b")])
    sheet = (REPOSITORY / "python" / "surogate" / "report" / "style.css").read_text()
    narrow = sheet[sheet.index("@media (max-width: 760px)") :]
    assert "attr(data-l)" in narrow and ".stacked thead" in narrow


def test_on_a_narrow_screen_texts_begin_at_the_left_and_no_label_is_over_a_curve():
    style = (REPOSITORY / "python" / "surogate" / "report" / "style.css").read_text()
    narrow = style[style.index("@media (max-width: 760px)") :]
    assert ".stacked td.v[data-l] { display: block; text-align: left; }" in narrow
    html = Chart("Norm", [Line("norm", [(0, 0.5), (9, 2.0)])], level=("clipped above 1", 1.0)).html()
    plot = html[html.index('<div class="plot">') :]
    assert "<em style=" in plot and "clipped above 1" not in plot.split("<script")[0]
    assert '<span class="k level">clipped above 1</span>' in html[: html.index('<div class="plot">')]
