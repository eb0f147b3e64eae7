"""Writes a report as one HTML file for reading offline: charts, and tables of their numbers."""

from collections.abc import Iterable, Sequence
from html import escape

from matplotlib.figure import Figure

from device_agent.profiling.profile_text import (
    COLUMNS,
    LEGEND,
    conditions,
    label,
    row,
)
from profiles.documents.bundle_profile import UNSTABLE_SPREAD, Profile
from profiles.text_formatting import (
    NOT_MEASURABLE,
    format_bytes,
    format_seconds,
    megabytes,
    milliseconds,
)
from toolkit.report.charts import (
    COLOURS,
    NAMES,
    THEMED,
    draw_memory,
    draw_sustained,
    draw_time,
    keys,
    name_of,
    panel,
    svg,
)
from toolkit.report.page_style import STYLE
from toolkit.report.phase_costs import Cost, Report, over_budget

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy: the page loads nothing, and only its own style applies."""

BARS = "Bars of {}, one for each submodel; the table below has the same numbers"
MEMORY_NOTE = (
    "Process peak: the highest resident memory of a process that does nothing else, including "
    "Python and the runtime. Each colour shows what its phase adds to the phases before it, so the "
    "right end of a colour is the peak of that phase. The thin bar below shows the prediction in "
    "the bundle's manifest."
)
TIME_NOTE = (
    "Medians for one batch. Backpropagation is the training step minus the forward pass of the "
    "trained part. Forward stages record the activations that the trained part starts from, once "
    "in a round for all epochs. The line below shows p10 to p90 of the training step."
)


def page(report: Report) -> str:
    """Write a report as an HTML document.

    Args:
        report: The costs of the submodels.

    Returns:
        The document. It needs no other file.
    """
    about = report.costs[0].profile
    title = f"What a training step costs on {name_of(report)}"
    rows = len(report.costs)
    memory, time = panel(rows), panel(rows)
    draw_memory(memory[1], report)
    draw_time(time[1], report)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=under>{escape(setting(about))}</p>",
        headline(report),
        *warnings(report),
        section(
            *("Memory", MEMORY_NOTE, legend(report)),
            picture(memory[0], "memory", BARS.format("memory")),
            memory_table(report),
        ),
        section(
            *("Time", TIME_NOTE, picture(time[0], "time", BARS.format("time"))),
            time_table(report),
        ),
        section("Every phase", " ".join(LEGEND), *(phases(cost, report) for cost in report.costs)),
        *(course(cost) for cost in report.costs),
        section("How it was measured", "", method(about)),
    ]
    return framed(title, parts)


def framed(title: str, parts: Iterable[str]) -> str:
    """An HTML document with the title and the content `parts`."""
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def picture(drawn: Figure, name: str, described: str) -> str:
    """HTML of a figure that scrolls on narrow screens; `described` is for screen readers."""
    return f"<div class=wide>{svg(drawn, name, described)}</div>"


def setting(about: Profile) -> str:
    """The conditions of the measurement in one line."""
    return (
        f"One batch of {about.batch_size}, {about.method.threads or 'all'} "
        f"thread{'' if about.method.threads == 1 else 's'}, {about.machine.runtime}, measured "
        f"{about.measured_at[:10]}"
    )


def headline(report: Report) -> str:
    """HTML with the highest peak, and whether it is within the budget."""
    highest = report.highest
    if highest is None or highest.peak is None:
        return f"<p class=peak>The process peak was {NOT_MEASURABLE} on this machine.</p>"
    said = (
        f"<strong>{format_bytes(highest.peak)}</strong> at the peak: "
        f"<b>{escape(highest.submodel)}</b>, {escape(highest.decisive or '')}"
    )
    over = over_budget(report, highest)
    if over is None:
        return f"<p class=peak>{said}</p>"
    excesses = [over_budget(report, cost) for cost in report.costs]
    within = [excess for excess in excesses if excess is not None and excess <= 0]
    fits = f"{len(within)} of {len(report.costs)} fit the budget of {format_bytes(report.budget)}"
    verdict = (
        f"{format_bytes(over)} over; {fits}" if over > 0 else f"{format_bytes(-over)} to spare"
    )
    return f"<p class='peak{' over' if over > 0 else ''}'>{said}<br>{verdict}</p>"


def warnings(report: Report) -> Iterable[str]:
    """Yield HTML with warnings about invalid and unstable figures."""
    for cost in report.costs:
        for reason in cost.profile.validity.invalid:
            yield f"<p class=warning>Not valid: {escape(f'{cost.submodel}, {reason}')}.</p>"
    varying = [f"{c.submodel} ({', '.join(c.unstable)})" for c in report.costs if c.unstable]
    if varying:
        yield (
            f"<p class=note>Times of {escape(', '.join(varying))} vary by more than "
            f"{UNSTABLE_SPREAD:.0%} of their median from p10 to p90: something else ran on the "
            "machine.</p>"
        )


def section(title: str, text: str, *content: str) -> str:
    """HTML of a section: a heading, a paragraph and content."""
    said = f"<p>{escape(text)}</p>" if text else ""
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", said, *content, "</section>"])


def legend(report: Report) -> str:
    """The meaning of each colour that the report uses."""
    items = (
        f"<li><i style='background:var(--{THEMED[colour]})'></i>{name}</li>"
        for colour, name in keys(report).items()
    )
    return f"<ul class=legend>{''.join(items)}</ul>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML of a table. Its first column has the headings of the rows."""
    columns = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    body = "\n".join(
        f"<tr><th scope=row>{escape(first)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f"<div class=wide><table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{columns}</tr>"
        f"</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def memory_table(report: Report) -> str:
    """HTML of a table with the numbers of the memory chart."""
    rows = [
        [
            cost.submodel,
            *(megabytes(dict(cost.memory).get(part)) for part in COLOURS),
            megabytes(cost.peak),
            megabytes(cost.predicted),
        ]
        for cost in report.costs
    ]
    head = ["submodel", *NAMES.values(), "peak", "predicted"]
    return table("MB; each part is what it adds to the parts before it", head, rows)


def time_table(report: Report) -> str:
    """HTML of a table with the numbers of the time chart."""
    parts = [part for part in COLOURS if part != "idle"]
    rows = [
        [
            cost.submodel,
            *(milliseconds(dict(cost.time).get(part)) for part in parts),
            *(milliseconds(s) for s in (cost.seconds, cost.train.p10_s, cost.train.p90_s)),
        ]
        for cost in report.costs
    ]
    head = ["submodel", *(NAMES[part] for part in parts), "batch", "step p10", "step p90"]
    return table("ms for one batch", head, rows)


def phases(cost: Cost, report: Report) -> str:
    """HTML of a submodel's phases. It is unfolded for the submodel with the highest peak."""
    rows = []
    for phase in cost.profile.phases:
        first, *figures = row(phase)
        rows.append([f"{first} (peak)" if label(phase) == cost.decisive else first, *figures])
    drawn = table(f"Phases of {cost.submodel}", ["phase", *COLUMNS[1:]], rows)
    opened = " open" if cost is report.highest else ""
    said = f"{cost.submodel}: {format_bytes(cost.peak)}, {format_seconds(cost.seconds)} a batch"
    return f"<details{opened}><summary>{escape(said)}</summary>\n{drawn}</details>"


def course(cost: Cost) -> str:
    """HTML of a submodel's sustained run (minutes of training); empty if there was none."""
    run = cost.profile.sustained
    if run is None:
        return ""
    drawn, axes = panel(3)
    draw_sustained(axes, run)
    text = (
        f"{run.duration_s:.0f} s without a pause: {format_seconds(run.first.median_s)} a step "
        f"in the first {run.window_s:.0f} s, {format_seconds(run.last.median_s)} in the last "
        f"({run.slowdown:+.1%})."
    )
    name = f"sustained-{cost.profile.structure[:8]}"
    chart = picture(drawn, name, "Time of a training step over the minutes of a sustained run")
    return section(f"Sustained training of {cost.submodel}", text, chart)


def method(about: Profile) -> str:
    """HTML with machine, versions and method, which are the same for all profiles."""
    machine, how = about.machine, about.method
    memory = None if machine.memory_bytes is None else format_bytes(machine.memory_bytes)
    python = "" if machine.python is None else f", Python {machine.python}"
    facts = {
        "Machine": machine.model,
        "Processor": f"{machine.processor or machine.architecture}, {machine.cpu_count} cores",
        "Memory": memory,
        "System": machine.system + python,
        "Versions": ", ".join([machine.runtime, *(f"{n} {v}" for n, v in about.versions.items())]),
        "Clock": how.clock,
        "Runs": f"{how.runs} counted, {how.warm_up_runs} before that to warm up, each phase in a "
        "process of its own" if how.source == "profile" else f"{how.runs} steps of a round",
        "Runtime's memory": how.arena,
        "Conditions": conditions(about.before, about.after),
    }  # fmt: skip
    items = (f"<dt>{n}</dt><dd>{escape(fact)}</dd>" for n, fact in facts.items() if fact)
    return f"<dl>{''.join(items)}</dl>"
