"""A job function's options: its keyword parameters, and how the text of `-o name=value` becomes one's value."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from taskgraph.errors import JobError

__all__ = [
    "OptionInfo",
    "check_fields",
    "check_plain",
    "fields_of",
    "help_text",
    "options_of",
    "options_text",
    "parse",
]


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """An option of a job function: a keyword parameter.

    Attributes:
        type: its annotation, or else the type of its default.
        required: it has no default.
        help: what the function's docstring says about it under `Args:`.
    """

    name: str
    type: Any
    default: Any
    required: bool
    help: str = ""


def options_of(function: Callable[..., Any]) -> dict[str, OptionInfo]:
    """The options of a function, in the order of its signature."""
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # it names what only a type checker imports: defaults have types too
        hints = {}
    helps = _helps(inspect.getdoc(function) or "")
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        implied = Any if required else str | None if default is None else type(default)
        found[name] = OptionInfo(name, hints.get(name, implied), default, required, helps.get(name, ""))
    return found


def fields_of(cls: type) -> dict[str, OptionInfo]:
    """The fields of a dataclass, each with its default, as options."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {field.name: OptionInfo(field.name, hints[field.name], field.default, required=False) for field in fields}


def options_text(options: dict[str, OptionInfo]) -> str:
    """The options with their defaults, for messages."""
    return ", ".join(o.name if o.required else f"{o.name}={o.default!r}" for o in options.values()) or "none"


def help_text(options: dict[str, OptionInfo]) -> str:
    """A line for each, as `--help` shows it."""
    rows = [(f"-o {o.name}={'...' if o.required else o.default}", _name(o.type), o.help) for o in options.values()]
    wide = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    lines = [f"  {row[0]:{wide[0]}}  {row[1]:{wide[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join(lines) or "  none"


def parse(
    function: str, options: dict[str, OptionInfo], texts: Iterable[str], *, flag: str = "-o", kind: str = "option"
) -> dict[str, Any]:
    """Keyword arguments from `name=value` texts; of several for one name the last one counts.

    Args:
        flag: what these texts are given with.
        kind: what each of them is called.

    Raises:
        JobError: no such option, or a value that is none of its type.
    """
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise JobError(
                f"{kind} {text!r}: write {flag} name=value; the {kind}s of {function} are: {options_text(options)}"
            )
        if name not in options:
            close = difflib.get_close_matches(name, options, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise JobError(f"{function} has no {kind} {name!r}{hint}; its {kind}s are: {options_text(options)}")
        given[name] = _convert(f"{kind} {name}", value, options[name].type)
    return given


def check_fields(cls: type, given: Iterable[str]) -> None:
    """Raises JobError where a dataclass has no such fields to be made with."""
    known = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    for name in given:
        if name not in known and not name.startswith("_"):
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes: {', '.join(known)}"
            raise JobError(f"{cls.__name__}({name}=...): {cls.__name__} has no {name!r}; {hint}")


def check_plain(what: str, value: Any) -> None:
    """Raises JobError unless `value` is the same after a way through JSON."""
    if value is None or type(value) in (bool, float, str):
        return
    if type(value) is int:
        try:
            str(value)
        except ValueError:  # too many digits (`sys.set_int_max_str_digits`)
            raise JobError(
                f"{what}: nodes get a job's arguments as JSON, and of an int of so many digits there is none; pass a "
                f"text, as of hex(), instead"
            ) from None
        return
    if type(value) is list:
        for item in value:
            check_plain(what, item)
        return
    if type(value) is dict and all(type(key) is str for key in value):
        for item in value.values():
            check_plain(what, item)
        return
    way_out = {"tuple": "; make it a list", "dict": " with other keys than str"}.get(
        type(value).__name__, "; pass a number, or the name of a file that every node can read"
    )
    raise JobError(
        f"{what}: nodes get a job's arguments as JSON: None, bool, int, float, str, lists and dicts of these, not "
        f"{type(value).__name__}{way_out}"
    )


def _helps(doc: str) -> dict[str, str]:
    """Parameter -> text, from the `Args:` section of a Google-style docstring."""
    helps: dict[str, str] = {}
    _, found, section = doc.partition("\nArgs:\n")
    indent, name = 0, ""
    for line in section.splitlines() if found else ():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        indent = indent or depth
        if depth == indent and ":" in line:
            name, _, text = line.strip().partition(":")
            name = name.partition("(")[0].strip()
            helps[name] = text.strip()
        elif name:
            helps[name] = f"{helps[name]} {line.strip()}".strip()
    return helps


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
#: Of several types the narrow ones are tried first: every text is a str, and every int a float.
_WIDTH = {type(None): 0, int: 1, float: 2, str: 9}


def _convert(name: str, text: str, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in sorted(kinds, key=lambda kind: _WIDTH.get(kind, 3)):
        try:
            return _value(text.strip(), text, kind)
        except ValueError:
            continue
    expected = " or ".join(map(_name, kinds))
    raise JobError(f"{name}={text!r}: expected {expected}")


def _value(text: str, raw: str, kind: Any) -> Any:
    """The text as a value of this type; raises ValueError where it is none."""
    origin = get_origin(kind) or kind
    if kind is type(None):
        if text.lower() in ("none", "null"):
            return None
        raise ValueError
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError
    if kind is int:
        return _int(text)
    if kind is float:
        return float(text)
    if origin is Literal:
        for choice in get_args(kind):
            if str(choice) == text:
                return choice
        raise ValueError
    if kind in (Any, object):
        try:
            return json.loads(text)
        except ValueError:
            return raw
    container = _container(origin)
    return _json(text, container) if container is not None else raw


def _container(origin: Any) -> type | None:
    """What JSON must hold for a type: a list also for Sequence, Iterable and tuple, a dict also for Mapping."""
    if not isinstance(origin, type):
        return None
    if origin is tuple or issubclass(list, origin):
        return list
    return dict if issubclass(dict, origin) else None


def _int(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        number = float(text)  # 1e6 is a number of rows, too
        if not number.is_integer() or abs(number) > 2**53:
            raise ValueError from None
        return int(number)


def _json(text: str, kind: type) -> Any:
    value = json.loads(text)
    if type(value) is not kind:
        raise ValueError
    return value


def _name(kind: Any) -> str:
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is type(None):
        return "none"
    name = str(kind).replace("typing.", "").replace("collections.abc.", "")
    if not get_args(kind):
        name = getattr(kind, "__name__", name)
    return f"{name} as JSON" if _container(get_origin(kind) or kind) is not None else name
