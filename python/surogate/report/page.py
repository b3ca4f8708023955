"""The report page of one run.

Knows the curves of a run; `charts.py` draws them, `sections.py` has the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from ..logs.stream import History
from . import sections
from .charts import Chart, Line, course
from .series import finite, median, smoothed, tail
from .words import amount, bytes_text, count, duration, percent

#: What a run is doing, in a word, and the class of its chip.
STATES = {
    "running": "running",
    "finished": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
    "silent": "ended unexpectedly",
}


def state(history: History, is_running: bool) -> str:
    """One of [`STATES`]."""
    if history.end is not None:
        return history.end["event"]
    return "running" if is_running else "silent"


def render(history: History, is_running: bool = False, refresh: float = 0) -> str:
    """The page. `refresh` are the seconds after which a browser reloads it during the run."""
    now = state(history, is_running)
    name = str(history.manifest.get("run", "run"))
    body = (
        _header(history, now)
        + _error(history)
        + tiles(history)
        + f'<div class="charts">{"".join(chart.html() for chart in charts(history))}</div>'
        + sections.samples(history)
        + sections.memory(history)
        + sections.decisions(history)
        + sections.data(history)
        + sections.options(history)
        + sections.environment(history)
        + sections.marks(history)
    )
    return document(name, body, refresh if now == "running" else 0)


def document(title: str, body: str, refresh: float = 0) -> str:
    """A whole page: style and script are in it, nothing is loaded."""
    style, script = ((files(__package__) / name).read_text("utf-8") for name in ("style.css", "page.js"))
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · surogate</title><style>{style}</style></head>"
        f'<body data-refresh="{refresh:g}" data-run="{escape(title)}"><main>{body}'
        f"<footer>Written {written}.</footer></main><script>{script}</script></body></html>\n"
    )


def _header(history: History, now: str) -> str:
    manifest, total = history.manifest, history.total
    machine = (manifest.get("machine") or {}).get("name", "")
    task = {"sft": "fine-tuning", "pt": "training"}.get(manifest.get("task", ""), "training")
    began = str(manifest.get("started", ""))[:16].replace("T", " ")
    bar = ""
    if total:
        bar = f'<div class="progress"><div style="width:{100 * min(1.0, history.done / total):.2f}%"></div></div>'
    return (
        f'<header><div class="title"><h1>{escape(str(manifest.get("run", "run")))}</h1>'
        f'<span class="chip {now}">{STATES[now]}</span></div>'
        f"<p>{task} of {escape(str(manifest.get('model', '')))} on {escape(str(machine))}, started {escape(began)}</p>"
        f"{bar}</header>"
    )


def _error(history: History) -> str:
    if history.end and history.end["event"] == "failed":
        return f'<div class="card error mono">{escape(str(history.end.get("error")))}</div>'
    return ""


def tiles(history: History) -> str:
    """The run in a few numbers."""
    steps = list(history.steps.values())
    if not steps:
        return ""
    last, seconds = steps[-1], history.steps.seconds
    found = [(count(history.done) + (f" / {count(history.total)}" if history.total else ""), "steps")]
    recent = tail(finite([(step["step"], step.get("loss")) for step in steps]))
    if recent:
        mean, of = recent
        found.append((f"{mean:.4f}", f"loss, mean of the last {amount(of, 'step')}"))
    evaluations = finite([(at, of.get("loss")) for at, of in history.evaluations.items()])
    if evaluations:
        at, best = min(evaluations, key=lambda point: point[1])
        found.append((f"{best:.4f}", f"best evaluation, after {amount(round(at), 'step')}"))
    speed = throughput(history)
    if speed:
        words = [("mfu", "MFU"), ("ceiling", "of the ceiling")]
        shares = [f"{percent(last[key])} {word}" for key, word in words if last.get(key)]
        found.append((f"{count(speed)}", " · ".join(["tokens per second", *shares])))
    memory = history.steps.memory
    if memory:
        found.append((bytes_text(memory), "peak memory in use"))
    left = ""
    if history.total and history.done < history.total and history.end is None:
        left = f", {duration(seconds / history.steps.count * (history.total - history.done))} left"
    found.append((duration(seconds), f"time in steps{left}"))
    cells = "".join(
        f'<div class="tile card"><b>{value}</b><small>{escape(name)}</small></div>' for value, name in found
    )
    return f'<div class="tiles">{cells}</div>'


def throughput(history: History) -> float | None:
    """Tokens per second, the median of the steps: the first ones of a process and those that waited do not count."""
    return median([step["tokens_per_second"] for step in history.steps.values()])


def charts(history: History) -> list[Chart]:
    """The curves over steps."""
    steps = list(history.steps.values())
    options = history.options

    def of(key: str, factor: float = 1.0) -> list[tuple[float, float | None]]:
        return [(step["step"], step[key] * factor if step.get(key) is not None else None) for step in steps]

    held_out = finite([(at, event.get("loss")) for at, event in sorted(history.evaluations.items())])
    openings = [mark["step"] for mark in history.marks if mark["event"] == "resume"]
    resumed = [(step, f"resumed after {amount(step, 'step')}") for step in openings]
    clip = options.get("max_grad_norm") or 0
    loss = [*course("loss", of("loss")), Line("evaluation", held_out, 2, dots=True)]
    return [
        Chart("Loss", loss, wide=True, marks=resumed, until=history.total),
        *answer_charts(history, of),
        Chart(
            "Gradient norm",
            course("norm", of("grad_norm"), 4),
            unit="before clipping",
            log=True,
            level=(f"clipped above {clip:g}", clip) if clip else None,
        ),
        Chart("Learning rate", [Line("learning rate", finite(of("learning_rate")), 5)], floor=0),
        Chart("Throughput", course("tokens per second", of("tokens_per_second"), 3), unit="tokens per second", floor=0),
        Chart(
            "Efficiency",
            [
                Line("of the measured ceiling", smoothed(finite(of("ceiling", 100))), 3),
                Line("of the peak (MFU)", smoothed(finite(of("mfu", 100))), 1),
            ],
            unit="%, matrix multiplications",
            floor=0,
        ),
        *router_charts(of),
        *device_charts(history),
    ]


def answer_charts(history: History, of: Callable[[str], list[tuple[float, float | None]]]) -> list[Chart]:
    """Charts of tasks that compare answers; a chart without a number is left out."""

    def line(name: str, key: str, colour: int, factor: float = 1.0) -> Line:
        return Line(name, smoothed(finite([(at, None if of_step is None else of_step * factor) for at, of_step in of(key)])), colour)

    def held_out(key: str, factor: float) -> Line:
        events = sorted(history.evaluations.items())
        values = [(at, None if event.get(key) is None else event[key] * factor) for at, event in events]
        return Line("evaluation", finite(values), 2, dots=True)

    share = "accuracy" if finite(of("accuracy")) else "rewards/accuracies"
    found = [
        Chart("Reward", [line("steps", "reward", 1), held_out("reward", 1)]),
        Chart(
            "Length of answers",
            [line("steps", "completions/mean_length", 3), held_out("completions/mean_length", 1)],
            unit="tokens", floor=0,
        ),
        Chart("Answers that were cut off", [line("steps", "completions/clipped_ratio", 4, 100)], unit="%", floor=0, top=100),
        Chart(
            "Distance of sampler and training", [line("steps", "sampling/sampling_logp_difference/mean", 6)],
            unit="nats a token", floor=0,
        ),
        Chart("Pairs in order", [line("steps", share, 1, 100), held_out(share, 100)], unit="%", floor=0, top=100),
        Chart(
            "Rewards",
            [
                line("chosen", "rewards/chosen", 3), line("rejected", "rewards/rejected", 4),
                line("margin", "rewards/margins", 1), line("margin", "margin", 1), line("least", "min_reward", 4),
                line("mean", "mean_reward", 3), line("largest", "max_reward", 5),
            ],
            unit="smoothed",
        ),
        Chart(
            "Log-probabilities of answers",
            [line("chosen", "logps/chosen", 3), line("rejected", "logps/rejected", 4)],
            unit="smoothed",
        ),
        Chart("Divergence from the reference", [line("KL", "kl", 6)], unit="nats an answer", floor=0),
        Chart(
            "Parts of the loss",
            [line("divergence", "divergence", 1), line("cross entropy", "cross_entropy", 3)],
            unit="nats a token",
            floor=0,
        ),
        Chart("Entropy of the model", [line("steps", "entropy", 2), held_out("entropy", 1)], unit="nats a token", floor=0),
    ]  # fmt: skip
    for chart in found:
        chart.lines = [line for line in chart.lines if line.points]
    return [chart for chart in found if chart.lines]


def router_charts(of: Callable[[str], list[tuple[float, float | None]]]) -> list[Chart]:
    """Charts of mixtures of experts."""
    if not finite(of("router_entropy")):
        return []
    return [
        Chart("Busiest expert", course("choices", of("busiest_expert"), 3), unit="times an even load", floor=0),
        Chart("Entropy of routers", course("entropy", of("router_entropy"), 2), unit="nats a token", floor=0),
        Chart("Loss of uneven loads", course("loss", of("router_loss"), 4), unit="before its coefficient"),
    ]


def device_charts(history: History) -> list[Chart]:
    """Readings of the device's sensors."""
    looks = list(history.device.items())

    def of(key: str, factor: float = 1.0):
        return finite([(at, event[key] * factor if event.get(key) is not None else None) for at, event in looks])

    clock, power = of("clock_mhz"), of("power_watts")
    limit = next((event["power_limit_watts"] for _, event in looks if event.get("power_limit_watts")), None)
    return [
        Chart(
            "Device utilization",
            [Line("compute", of("utilization", 100), 7), Line("memory", of("memory_utilization", 100), 4)],
            unit="%",
            floor=0,
            top=100,
        ),
        Chart("Clock", [Line("SM clock", clock, 1)], unit="MHz", floor=0),
        Chart("Power", [Line("power", power, 6)], unit="W", floor=0, level=("limit", limit) if limit else None),
        Chart("Memory in use", [Line("memory", of("memory_used", 1 / (1 << 30)), 3)], unit="GiB", floor=0),
    ]
