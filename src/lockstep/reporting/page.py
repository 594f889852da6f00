"""Write runs as one page of HTML that needs nothing else: style, script, data and images are in it."""

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from lockstep.models.metrics import format_loss
from lockstep.reporting import summary
from lockstep.reporting.curves import charts
from lockstep.reporting.views import as_data, image_key, views, with_images
from lockstep.runs.reading import Run
from lockstep.system.html import allowed, colours
from lockstep.system.version import version

TEMPLATE = "report.html.j2"
SCRIPTS = ("drawing.js", "curves.js", "diagrams.js", "report.js")
"""The parts of the one script, in the order in which they run."""
MISSING = "\N{EN DASH}"
"""Shown in place of a missing figure."""


def render(runs: Sequence[Run], *, explain: bool = False) -> str:
    """Return the page of some runs. With `explain`, it shows Grad-CAM over the images of mistakes.

    Names of classes, files and folders are texts of a user. The template escapes them (autoescape).
    Its `tojson` filter writes the characters of tags as JSON escapes. A content security policy
    lets the browser run only the one script whose hash it names, and lets it fetch nothing and send
    nothing.
    """
    found, images = with_images(runs, views(runs), explain=explain)
    script = "".join(map(_file, SCRIPTS))
    style = colours() + _file("report.css")
    speeds = summary.speeds(runs)
    data = {
        "runs": [
            {"name": run.name, "steps": run.steps, "epochs": run.recipe.epochs} for run in runs
        ],
        "charts": [
            vars(chart) | {"curves": [vars(curve) for curve in chart.curves]}
            for chart in charts(runs)
        ],
        "views": [as_data(view) for view in found],
        "images": images,
    }
    return (
        _environment()
        .get_template(TEMPLATE)
        .render(
            runs=runs,
            results=summary.results(runs),
            agreement=summary.agreement(runs),
            speeds=speeds,
            published_accuracies=summary.published_accuracies(runs),
            published_speeds=summary.published_speeds(runs, speeds),
            percentiles=summary.PERCENTILES,
            recipe=summary.recipe_fields(runs),
            environments=summary.environments(runs),
            published_differences=summary.published_differences,
            charts=data["charts"],
            views=found,
            image_key=image_key,
            data=data,
            style=Markup(style),
            script=Markup(script),
            script_source=Markup(allowed(script)),
            lockstep_version=version(),
            framework_version=_framework_version,
            interval_scale=_interval_scale(summary.results(runs)),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=DictLoader({TEMPLATE: _file(TEMPLATE)}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "percent": _percent,
        "number": _number,
        "duration": _duration,
        "loss": format_loss,
        "counted": _counted,
    }
    return environment


def _file(name: str) -> str:
    return (files("lockstep.reporting") / "templates" / name).read_text(encoding="utf-8")


def _percent(share: float | None, digits: int = 2) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def _counted(count: int, what: str) -> str:
    """Return a number with its noun, in the plural if needed.

    >>> _counted(1, "epoch"), _counted(90, "epoch")
    ('1 epoch', '90 epochs')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def _number(value: float | None, digits: int = 1) -> str:
    return (
        MISSING
        if value is None
        else f"{value:,.{digits}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    )


def _duration(seconds: float) -> str:
    """Return a time for a person to read.

    >>> _duration(5.25), _duration(75), _duration(3 * 3600 + 125)
    ('5.2 s', '1 min 15 s', '3 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def _framework_version(run: Run) -> str:
    """Return the framework of a run and its version; NumPy's for the reference engine."""
    name = "numpy" if run.backend == "reference" else run.backend
    found = run.environment.get(name)
    return f"{name} {found}" if found else name


def _interval_scale(found: list[summary.Result]) -> tuple[float, float]:
    """Return the range of shares in which all intervals of top-1 are drawn."""
    if not found:
        return 0.0, 1.0
    low = min(each.top1_interval[0] for each in found)
    high = max(each.top1_interval[1] for each in found)
    margin = (high - low) / 20
    return max(low - margin, 0.0), min(high + margin, 1.0)
