"""A job function's options: its keyword parameters, and their values from `-o name=value`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import numbers
import types
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, NewType, Union, get_args, get_origin, get_type_hints

from taskgraph.errors import JobError
from taskgraph.signatures import signature

__all__ = [
    "ARGPARSE",
    "OptionInfo",
    "check_fields",
    "fields_of",
    "help_text",
    "options_of",
    "options_text",
    "parse",
    "plain_json",
]

ARGPARSE: Final = "in place of argparse make its arguments parameters of the job function: `-o epochs=3` sets one"
"""What to do if argparse ends a driver, with sys.exit(2): the arguments are those of this package's command."""

_FEW = 16
"""More options are not listed beside a suggestion: settings would fill a screen."""


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """An option of a job function: a keyword parameter.

    Attributes:
        type: the annotation, or else the type of the default.
        required: there is no default; `default` is None then.
        help: the parameter's text under `Args:` in the function's docstring.
    """

    name: str
    type: Any
    default: Any
    required: bool
    help: str = ""


def options_of(function: Callable[..., Any]) -> dict[str, OptionInfo]:
    """Returns the options of a function, in the order of its parameters; leaves `**kwargs` out."""
    try:
        hints = get_type_hints(function)
    except (
        NameError,
        TypeError,
        AttributeError,
    ):  # a name for type checkers only: take the types of defaults
        hints = {}
    helps = _parse_args_section(inspect.getdoc(function) or "")
    found = {}
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        implied = Any if required else str | None if default is None else type(default)
        found[name] = OptionInfo(name, hints.get(name, implied), default, required, helps.get(name, ""))
    return found


def fields_of(cls: type) -> dict[str, OptionInfo]:
    """Returns the fields of a dataclass, each with its default, as options."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {field.name: OptionInfo(field.name, hints[field.name], field.default, required=False) for field in fields}


def options_text(options: dict[str, OptionInfo]) -> str:
    """Lists options with their defaults, for messages."""
    return ", ".join(o.name if o.required else f"{o.name}={o.default!r}" for o in options.values()) or "none"


def help_text(options: dict[str, OptionInfo]) -> str:
    """Formats a line for each option, for `--help`."""
    rows = [(f"-o {o.name}={'...' if o.required else o.default}", _type_text(o.type), o.help) for o in options.values()]
    wide = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    lines = [f"  {row[0]:{wide[0]}}  {row[1]:{wide[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join(lines) or "  none"


def _type_text(hint: Any) -> str:
    """Formats a type, for `--help`. Says so if no value of the type can be given on a command line."""
    usable = any(kind is not type(None) and _suggest_for_type(kind) is None for kind in _union_members(hint))
    return _describe_type(hint) if usable else f"{_type_name(hint)} (cannot be given)"


def parse(
    function: str, options: dict[str, OptionInfo], texts: Iterable[str], *, flag: str = "-o", kind: str = "option"
) -> dict[str, Any]:
    """Parses `name=value` texts to keyword arguments. If a name is given twice, the last value counts.

    Args:
        flag: the flag of these texts, for messages.
        kind: "option" or "setting", for messages.

    Raises:
        JobError: an unknown name, a value of another type, or a type that JSON cannot carry.
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
            known = "" if close and len(options) > _FEW else f"; its {kind}s are: {options_text(options)}"
            raise JobError(f"{function} has no {kind} {name!r}{hint}{known}")
        given[name] = _parse_option(f"{kind} {name}", value, options[name].type)
    return given


def check_fields(cls: type, given: Iterable[str], call: str = "") -> None:
    """Raises JobError if one of the `given` names is no field of a dataclass, and has no leading underscore.

    Args:
        call: what the user called, for messages; "": the class.
    """
    title = call or cls.__name__
    known = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    for name in given:
        if name not in known and not name.startswith("_"):
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes: {', '.join(known)}"
            raise JobError(f"{title}({name}=...): {title} has no {name!r}; {hint}")


def plain_json(what: str, value: Any) -> Any:
    """Returns a value as plain JSON values: numpy's numbers become Python's.

    Args:
        what: the value's name, for messages.

    Raises:
        JobError: JSON cannot carry the value exactly.
    """
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        try:
            str(value)
        except ValueError:  # too many digits (`sys.set_int_max_str_digits`)
            raise JobError(
                f"{what}: nodes get a job's arguments as JSON, which cannot carry an int this large; pass a text, "
                f"such as hex(), instead"
            ) from None
        return value
    if type(value) is list:
        return [plain_json(what, item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain_json(what, item) for key, item in value.items()}
    kind = _unwrap_type(type(value))
    if kind is not type(value) and value.itemsize <= _FLOAT_BYTES:
        return kind(value)
    way_out = {"tuple": "; pass a list", "dict": " with other keys than str"}.get(
        type(value).__name__, "; pass a number, or the name of a file that every node can read"
    )
    if isinstance(value, Enum):
        way_out = f"; pass its value, and call {type(value).__name__}(...) in the function"
    raise JobError(
        f"{what}: nodes get a job's arguments as JSON: None, bool, int, float, str, lists and dicts of these, not "
        f"{type(value).__name__}{way_out}"
    )


_FLOAT_BYTES = 8
"""A long double has more digits than a Python float."""


def _parse_args_section(doc: str) -> dict[str, str]:
    """Reads {parameter: text} from the `Args:` section of a Google-style docstring."""
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
_ORDER_TRIED = {type(None): 0, int: 1, float: 2, str: 9}
_SCALARS = (type(None), bool, int, float, str)


def _parse_option(name: str, text: str, hint: Any) -> Any:
    """Converts the text of an option to a value of its type. Raises JobError if the text is no such value."""
    for kind in _narrow_first(hint):
        if _suggest_for_type(kind) is None:
            try:
                return _parse_value(text.strip(), text, kind)
            except ValueError:
                continue
    if (instead := _suggest_annotation(hint)) is not None:
        raise JobError(
            f"{name}={text!r}: its annotation is {_type_name(hint)}, and nodes get a job's arguments as JSON: annotate "
            f"the parameter with {instead}"
        )
    expected = " or ".join(map(_describe_type, _union_members(hint)))
    raise JobError(f"{name}={text!r}: expected {expected}")


def _union_members(hint: Any) -> list[Any]:
    """Returns the member types of a union, or the type itself, without NewType and Annotated."""
    hint = _unwrap_type(hint)
    if get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    return [kind for member in get_args(hint) for kind in _union_members(member)]


def _narrow_first(hint: Any) -> list[Any]:
    """Returns the member types of a union in the order in which they are tried."""
    return sorted(_union_members(hint), key=lambda kind: _ORDER_TRIED.get(kind, 3))


def _unwrap_type(hint: Any) -> Any:
    """Returns the type inside a NewType or Annotated; for numpy's number types, Python's."""
    if isinstance(hint, NewType):
        return _unwrap_type(hint.__supertype__)
    if get_origin(hint) is Annotated:
        return _unwrap_type(get_args(hint)[0])
    cls = get_origin(hint) or hint
    if isinstance(cls, type) and cls.__module__ == "numpy" and cls.__name__ != "timedelta64":
        if issubclass(cls, numbers.Integral):
            return int
        if issubclass(cls, numbers.Real):
            return float
        if cls.__name__ in ("bool", "bool_"):
            return bool
    return hint


def _suggest_annotation(hint: Any) -> str | None:
    """Returns an annotation to use in place of a type that JSON cannot carry; None if JSON can carry the type."""
    return next((instead for kind in _union_members(hint) if (instead := _suggest_for_type(kind)) is not None), None)


def _suggest_for_type(kind: Any) -> str | None:
    """Returns an annotation to use in place of one type; None if JSON can carry the type."""
    if kind in (Any, object, *_SCALARS) or get_origin(kind) is Literal:
        return None
    container, parts = _json_container(get_origin(kind) or kind), get_args(kind)
    if container is not None:
        if container is dict and parts and any(not _is_json_key_type(key) for key in _union_members(parts[0])):
            return "dict[str, ...]: JSON has no other keys"
        return next(
            (instead for part in parts if part is not ... and (instead := _suggest_annotation(part)) is not None), None
        )
    cls = get_origin(kind) or kind
    if isinstance(cls, type):
        name = cls.__name__
        if issubclass(cls, Enum):
            values = [member.value for member in cls]
            if not all(type(value) in _SCALARS for value in values):
                return f"Literal[{', '.join(map(repr, cls.__members__))}], and use {name}[...] in the function"
            return f"Literal[{', '.join(map(repr, values))}], and call {name}(...) in the function"
        if issubclass(cls, PurePath):
            return f"str, and call {name}(...) in the function"
        if issubclass(cls, Set):
            return f"list[{', '.join(map(_describe_type, parts)) or '...'}], and call {name}(...) in the function"
    return "bool, int, float, str, Literal[...], list[...], dict[str, ...], or a union of these and None"


def _is_json_key_type(kind: Any) -> bool:
    return kind in (str, Any, object) or get_origin(kind) is Literal


def _parse_value(text: str, raw: str, kind: Any) -> Any:
    """Parses a text as a value of one type, no union. Raises ValueError. `raw` is the text with its spaces."""
    if kind is str:
        return raw
    if kind is type(None):
        if text.lower() in ("none", "null"):
            return None
        raise ValueError
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError
    if kind is int:
        return _parse_int(text)
    if kind is float:
        return float(text)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if str(choice) == text:
                return choice
        raise ValueError
    if kind in (Any, object):
        try:
            return json.loads(text)
        except ValueError:
            return raw
    return _convert_json_to(json.loads(text), kind)


def _json_container(origin: Any) -> type | None:
    """Returns the JSON container (list or dict) for a type such as Sequence, tuple or Mapping; None for others."""
    try:
        if origin is tuple or issubclass(list, origin):
            return list
        return dict if issubclass(dict, origin) else None
    except TypeError:  # no class, or one without subclass checks: a TypedDict, a protocol
        return None


def _parse_int(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        number = float(text)  # 1e6 is an int, too
        if not number.is_integer() or abs(number) > 2**53:
            raise ValueError from None
        return int(number)


def _convert_json(value: Any, hint: Any) -> Any:
    """Converts a JSON value to a type or a member of a union. Raises ValueError."""
    for kind in _narrow_first(hint):
        try:
            return _convert_json_to(value, kind)
        except ValueError:
            continue
    raise ValueError


def _convert_json_to(value: Any, kind: Any) -> Any:
    """Converts a JSON value to a type that is no union. Raises ValueError."""
    if kind in (Any, object):
        return value
    if type(value) in (int, float) and kind in (int, float):
        return _parse_int(repr(value)) if kind is int else float(repr(value))
    if get_origin(kind) is Literal:
        if any(type(choice) is type(value) and choice == value for choice in get_args(kind)):
            return value
        raise ValueError
    container, parts = _json_container(get_origin(kind) or kind), get_args(kind)
    wanted: Any = kind if kind in _SCALARS else container
    if type(value) is not wanted:
        raise ValueError
    if container is None or not parts:
        return value
    if container is dict:
        return {_convert_json(key, parts[0]): _convert_json(item, parts[1]) for key, item in value.items()}
    if get_origin(kind) is tuple and parts[-1] is not ...:
        return [_convert_json(item, part) for item, part in zip(value, parts, strict=True)]
    return [_convert_json(item, parts[0]) for item in value]


def _describe_type(kind: Any) -> str:
    kind = _unwrap_type(kind)
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is type(None):
        return "none"
    name = _type_name(kind)
    return f"{name} as JSON" if _json_container(get_origin(kind) or kind) is not None else name


def _type_name(kind: Any) -> str:
    if not get_args(kind) and hasattr(kind, "__name__"):
        return str(kind.__name__)
    return str(kind).replace("typing.", "").replace("collections.abc.", "")
