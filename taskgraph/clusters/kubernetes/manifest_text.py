"""Writes objects of Kubernetes as YAML that people read: short entries on one line, and comments.

PyYAML, which reads them in the tests, cannot write comments; and printing needs no package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["yaml_text"]

_WIDTH = 110
_PLAIN = re.compile(r"(--)?[A-Za-z_/][A-Za-z0-9_./@+-]*(:[A-Za-z0-9_./@+-]+)*")
_OTHER_MEANING = {"false", "n", "no", "null", "off", "on", "true", "y", "yes"}
"""Words that YAML takes for something else than text."""


def yaml_text(objects: Sequence[Mapping[str, Any]], comments: Mapping[str, str]) -> str:
    """Returns the objects as YAML documents.

    Args:
        comments: by path, such as "Job.spec.backoffLimit": a line to write before that entry. Entries of a list have
            the list's path.
    """
    return "---\n".join(
        "".join(f"{line}\n" for line in _map_lines(each, each["kind"], "", comments)) for each in objects
    )


def _map_lines(entries: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in entries.items():
        at = f"{path}.{name}"
        if at in comments:
            yield f"{indent}# {comments[at]}"
        yield from _entry_lines(f"{indent}{_scalar_text(name)}:", value, at, indent, comments)


def _entry_lines(begin: str, value: Any, path: str, indent: str, comments: Mapping[str, str]) -> Iterator[str]:
    commented = any(each.startswith(f"{path}.") for each in comments)
    flow = _flow_text(value)
    if not isinstance(value, dict | list) or not value or (not commented and _is_short(value, f"{begin} {flow}")):
        yield f"{begin} {flow}"
    elif isinstance(value, dict):
        yield begin
        yield from _map_lines(value, path, f"{indent}  ", comments)
    elif all(not isinstance(each, dict | list) for each in value):
        yield from _wrapped_lines(begin, [_scalar_text(each) for each in value])
    else:
        yield begin
        for each in value:
            yield from _item_lines(each, path, f"{indent}  ", comments)


def _item_lines(value: Any, path: str, indent: str, comments: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of an entry of a list."""
    if not isinstance(value, dict) or _is_short(value, f"{indent}- {_flow_text(value)}"):
        yield f"{indent}- {_flow_text(value)}"
        return
    lines = list(_map_lines(value, path, f"{indent}  ", comments))
    comment = lines.pop(0) if lines[0].lstrip().startswith("# ") else ""
    if comment:
        yield comment
    yield f"{indent}- {lines[0].lstrip()}"
    yield from lines[1:]


def _is_short(value: Any, line: str) -> bool:
    """True if an entry goes on one line: it is empty; or the line is not too long, and flat or shorter than half."""
    if not value or len(line) > _WIDTH:
        return not value
    inner = value.values() if isinstance(value, dict) else value
    return not any(isinstance(each, dict | list) and each for each in inner) or len(_flow_text(value)) < _WIDTH // 2


def _flow_text(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_scalar_text(name)}: {_flow_text(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow_text, value))}]"
    return _scalar_text(value)


def _wrapped_lines(begin: str, words: Sequence[str]) -> Iterator[str]:
    """Yields a list of words over several lines."""
    line, indent = f"{begin} [", " " * (len(begin) - len(begin.lstrip()) + 2)
    for index, word in enumerate(words):
        last = index == len(words) - 1
        word += "]" if last else ","
        if len(line) + len(word) > _WIDTH:
            yield line.rstrip()
            line = indent
        line += word if last else f"{word} "
    yield line


def _scalar_text(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _OTHER_MEANING:
        return value
    if isinstance(value, str):
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
    return json.dumps(value)
