"""Several runs on one page: overlaid curves, a summary, and the options that differ."""

from __future__ import annotations

from html import escape

from ..logs.stream import History
from .charts import Chart, Line
from .page import STATES, document, state, throughput
from .series import finite, smoothed, tail
from .words import bytes_text, count, duration, table, value_text

#: Colours that lines can have.
COLOURS = 8

#: Options that differ by their nature.
OWN = {
    "output_dir",
    "run_name",
    "log_file",
    "checkpoint_dir",
    "resume_from_checkpoint",
    "wandb_name",
    "aim_name",
    "push_to_hub",
    "hub_private_repo",
}


def render(histories: list[tuple[str, History]]) -> str:
    """The page, for runs with their names."""
    numbered = [(name, history, 1 + i % COLOURS) for i, (name, history) in enumerate(histories)]

    def lines(key: str) -> list[Line]:
        found = []
        for name, history, colour in numbered:
            points = finite([(step["step"], step.get(key)) for step in history.steps.values()])
            found.append(Line(name, points if len(points) < 30 else smoothed(points), colour))
        return found

    def held_out(key: str) -> list[Line]:
        return [
            Line(name, finite([(at, of.get(key)) for at, of in sorted(history.evaluations.items())]), colour, dots=True)
            for name, history, colour in numbered
        ]

    charts = [
        Chart("Loss", lines("loss"), unit="smoothed", wide=True),
        Chart("Evaluation", held_out("loss")),
        Chart("Reward", lines("reward"), unit="smoothed"),
        Chart("Reward of evaluations", held_out("reward")),
        Chart("Gradient norm", lines("grad_norm"), unit="smoothed", log=True),
        Chart("Learning rate", lines("learning_rate"), floor=0),
        Chart("Throughput", lines("tokens_per_second"), unit="tokens per second", floor=0),
    ]
    # Rewards are of runs that sample answers, which have no loss in evaluations.
    charts = [chart for chart in charts if any(line.points for line in chart.lines)]
    body = (
        f"<header><h1>{len(numbered)} runs</h1></header><h2>Summary</h2>{_numbers(numbered)}"
        f'<div class="charts">{"".join(chart.html() for chart in charts)}</div>{_differences(numbered)}'
    )
    return document(", ".join(name for name, _ in histories), body)


def _numbers(numbered: list[tuple[str, History, int]]) -> str:
    rows = []
    for name, history, colour in numbered:
        steps = list(history.steps.values())
        recent = tail(finite([(step["step"], step.get("loss")) for step in steps]))
        judged = list(history.evaluations.values())
        losses, rewards = ([of[key] for of in judged if of.get(key) is not None] for key in ("loss", "reward"))
        best = min(losses, default=None) if losses else max(rewards, default=None)
        memory = history.steps.memory
        rows.append(
            [
                f'<span class="dot c{colour}"></span>{escape(name)}',
                escape(STATES[state(history, False)]),
                escape(str((history.manifest.get("machine") or {}).get("name", ""))),
                str(history.done),
                f"{recent[0]:.4f}" if recent else "–",
                "–" if best is None else f"{best:.4f}",
                count(throughput(history) or 0),
                bytes_text(memory) if memory else "–",
                duration(history.steps.seconds),
            ]
        )
    head = ["run", "", "machine", "steps", "last losses", "best evaluation", "tokens/s", "memory", "time in steps"]
    return table(head, rows, ["", "s", "s", "n", "n", "n", "n", "n", "n"])


def _differences(numbered: list[tuple[str, History, int]]) -> str:
    names = list(dict.fromkeys(name for _, history, _ in numbered for name in history.options))
    rows = []
    for option in names:
        values = [value_text(history.options.get(option)) for _, history, _ in numbered]
        if option not in OWN and len(set(values)) > 1:
            rows.append([f"<code>{escape(option)}</code>", *[f"<code>{escape(value)}</code>" for value in values]])
    if not rows:
        return "<h2>Options</h2><p>All options are the same.</p>"
    return f"<h2>Options that differ</h2>{table(['option', *[name for name, _, _ in numbered]], rows)}"
