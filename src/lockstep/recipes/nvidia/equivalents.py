"""NVIDIA's options and their equivalents in words, from the same rows that translate commands."""

from lockstep.recipes.nvidia.table import PLACEHOLDERS, SLOTS, Option, Script, System

_SHOWN_VALUES = {f"{{{name}}}": shown for name, (_, shown) in PLACEHOLDERS.items()}


def describe_script(system: System, script: Script) -> str:
    """Return the tables of a script as Markdown: its options and their equivalents."""
    year = f" of {script.revision}" if script.revision else ""
    lines = [f"## {system.title}: `{script.name}`{year}", "", f"What it does: {script.about}.", ""]
    if script.not_here:
        return "\n".join([*lines, f"Not translated: {script.not_here}.", ""])
    if script.also:
        others = " and ".join(f"`{name}`" for name in script.also)
        lines += [f"It also takes the options of {others}; those below have precedence.", ""]
    always = []
    if "@command" not in script.arguments:
        always.append(f"`lockstep {script.command}`")
    if script.arguments:
        always.append(_template(script.arguments))
    if script.like:
        always.append(f"the fields of `{script.like}`")
    always += [f"`{name}={_value(value)}`" for name, value in script.fields.items()]
    lines += [f"Always: {', '.join(always)}.", ""]
    lines += ["| NVIDIA's | default | Lockstep |", "|---|---|---|"]
    for option in script.options:
        default = f"`{option.default}`" if option.default else ""
        lines.append(f"| {describe_names(option)} | {default} | {describe_equivalent(option)} |")
    if script.presets:
        lines += ["", f"What `{script.name}` adds:", "", "| with | options |", "|---|---|"]
        for preset in script.presets:
            words = (f"{name} {value}" for name, value in preset.when.items())
            when = " ".join(word.removesuffix(" true") for word in words)
            lines.append(f"| {f'`{when}`' if when else 'always'} | `{preset.adds}` |")
    return "\n".join([*lines, ""])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "").replace("'", "")


def describe_names(option: Option) -> str:
    """Return the names of an option, and a V for each of its values."""
    value = "" if option.positional else " V" * option.takes
    names = [f"`{name}`" for name in option.names]
    return ", ".join([*names[:-1], f"{names[-1][:-1]}{value}`"])


def describe_equivalent(option: Option) -> str:
    """Return what to type in Lockstep for an option, or why nothing is needed."""
    parts = _values(option)
    if option.to is not None:
        shown = _template(option.to) or "not needed"
        parts.append(f"others: {shown}" if option.values else shown)
    if option.absent:
        parts.append(f"without it: {_template(option.absent)}")
    if option.same:
        parts.append(f"not needed: {option.same}")
    if option.not_here:
        parts.append(f"{'others ' if option.values else ''}not translated: {option.not_here}")
    if option.needs:
        parts.append(f"only with `{option.needs}`")
    return "; ".join(parts) + (f" ({option.remark})" if option.remark else "")


def _values(option: Option) -> list[str]:
    """Return the values with templates of their own. Values that a field has under the same name
    are one part."""
    same: dict[str, list[str]] = {}
    others = []
    nothing = []
    for value, to in option.values.items():
        field = to.removesuffix(f"={value}")
        if not to:
            nothing.append(value)
        elif field != to and field.isidentifier():
            same.setdefault(field, []).append(value)
        else:
            others.append(f"`{value}`: {_template(to)}")
    parts = [f"`{field}=V` for {_list(values)}" for field, values in same.items()]
    parts += others
    if nothing:
        parts.append(f"{_list(nothing)}: not needed")
    return parts


def _list(values: list[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _template(to: str) -> str:
    """Return a template as the page shows it, each word as code."""
    measured = {"@command=evaluate": "inference", "@command=all": "all"}
    words = to.split()
    shown = []
    if "@benchmark=1" in words:
        kind = next((measured[word] for word in words if word in measured), "train")
        shown = [f"lockstep benchmark {kind}"]
        words = [word for word in words if word != "@benchmark=1" and word not in measured]
    return _list([*shown, *map(_word, words)])


def _word(word: str) -> str:
    name, equals, value = word.partition("=")
    for mark, shown in _SHOWN_VALUES.items():
        value = value.replace(mark, shown)
    if name.startswith("@"):
        return SLOTS[name[1:]].replace("{value}", value)
    return f"{name} {value}" if name.startswith("-") and equals else f"{name}{equals}{value}"
