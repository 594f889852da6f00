"""Write runs as one page of HTML, which holds its style, script, data and images."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from lockstep.models.latency import PERCENTILES
from lockstep.recipes.published import OWN_RECIPES
from lockstep.reporting import summary
from lockstep.reporting.collect import describe_cross_validations
from lockstep.reporting.curves import build_charts
from lockstep.reporting.same_images import compare_common_images, describe_other_images
from lockstep.reporting.views import add_images, build_views, image_key, select_data
from lockstep.runs.reading import Run
from lockstep.system.html import colours, hash_source
from lockstep.system.text import format_count
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
    views, images = add_images(runs, build_views(runs), explain=explain)
    script = "".join(map(_read_template, SCRIPTS))
    style = colours() + _read_template("report.css")
    results = summary.list_results(runs)
    speeds = summary.measure_speeds(runs)
    charts = build_charts(runs)
    agreement = summary.compare_predictions(runs)
    data = {
        "runs": [
            {"name": run.name, "steps": run.steps, "epochs": run.recipe.epochs} for run in runs
        ],
        "charts": list(map(asdict, charts)),
        "views": list(map(select_data, views)),
        "images": images,
    }
    template = _prepare_environment().get_template(TEMPLATE)
    return template.render(
        runs=runs,
        results=results,
        agreement=agreement if summary.has_pairs(agreement) else [],
        other_images=describe_other_images(runs),
        common_images=compare_common_images(runs),
        speeds=speeds,
        published_accuracies=summary.compare_accuracies(runs),
        published_speeds=summary.compare_speeds(runs, speeds),
        percentiles=PERCENTILES,
        recipe=summary.list_recipe_fields(runs),
        environments=summary.list_environments(runs),
        own_recipes=OWN_RECIPES,
        published_differences=summary.list_published_differences,
        cross_validations=describe_cross_validations(list(runs)),
        charts=charts,
        views=views,
        image_key=image_key,
        data=data,
        style=Markup(style),
        script=Markup(script),
        script_source=Markup(hash_source(script)),
        lockstep_version=version(),
        framework_version=_name_framework,
        interval_scale=_choose_scale(results),
    )


def _prepare_environment() -> Environment:
    environment = Environment(
        loader=DictLoader({TEMPLATE: _read_template(TEMPLATE)}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "percent": _format_percent,
        "number": _format_number,
        "duration": _format_duration,
        "counted": format_count,
    }
    return environment


def _read_template(name: str) -> str:
    return (files("lockstep.reporting") / "templates" / name).read_text(encoding="utf-8")


def _format_percent(share: float | None, digits: int = 2) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f}"


def _format_number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return MISSING
    return f"{value:,.{digits}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _format_duration(seconds: float) -> str:
    """Return a time for a person to read.

    >>> _format_duration(5.25), _format_duration(75), _format_duration(3 * 3600 + 125)
    ('5.2 s', '1 min 15 s', '3 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def _name_framework(run: Run) -> str:
    """Return the framework of a run and its version; NumPy's for the reference."""
    name = "numpy" if run.backend == "reference" else run.backend
    return f"{name} {run.environment.get(name, '')}".rstrip()


def _choose_scale(results: list[summary.Result]) -> tuple[float, float]:
    """Return the range of shares in which all intervals of top-1 are drawn."""
    if not results:
        return 0.0, 1.0
    low = min(result.interval()[0] for result in results)
    high = max(result.interval()[1] for result in results)
    margin = (high - low) / 20
    return max(low - margin, 0.0), min(high + margin, 1.0)
