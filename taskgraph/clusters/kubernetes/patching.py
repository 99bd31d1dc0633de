"""The patch file of `submit --on kubernetes`: changes to objects before they are printed or applied.

Each document of the file names a kind, and a name if it is for one object of that kind only. The rest is merged as
`kubectl patch` does by default (a strategic merge): maps are merged, null removes an entry, lists of containers,
variables, volumes and mounts are merged by their names, and other lists are replaced. `$patch: delete` removes the
object, or the entry of such a list.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taskgraph.errors import JobError

__all__ = ["apply_patches", "read_patches"]

_MERGE_BY = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""The lists that Kubernetes merges by a key, of those in our objects."""
_DIRECTIVE = "$patch"


def read_patches(path: Path) -> list[dict[str, Any]]:
    """Reads a patch file: YAML documents, or JSON.

    Raises:
        JobError: it cannot be read, or a document names no kind.
    """
    try:
        import yaml
    except ImportError:
        raise JobError("--patch needs PyYAML: pip install 'taskgraph-aio[kubernetes]'") from None
    try:
        found = [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document is not None]
    except OSError as error:
        raise JobError(f"--patch {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobError(f"--patch {path}: this is no YAML: {error}") from error
    for document in found:
        if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
            raise JobError(f"--patch {path}: each document begins with the kind that it changes, such as `kind: Job`")
        if not isinstance(document.get("metadata") or {}, dict):
            raise JobError(f"--patch {path}: {document['metadata']!r} is no metadata: write `metadata: {{name: ...}}`")
        try:
            json.dumps(document)
        except TypeError as error:
            raise JobError(f"--patch {path}: {error}: quote dates, and other values that YAML takes for them") from None
    return found


def apply_patches(objects: Sequence[dict[str, Any]], patches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the objects with all patches, without those that a patch deletes.

    Raises:
        JobError: a patch fits no object.
    """
    found = list(objects)
    for patch in patches:
        hit = [each for each in found if _applies_to(patch, each)]
        if not hit:
            raise JobError(f"--patch: there is no {_title(patch)}; there are: {', '.join(map(_title, found))}")
        if patch.get(_DIRECTIVE) == "delete":
            found = [each for each in found if each not in hit]
        else:
            found = [_merge(each, patch) if each in hit else each for each in found]
    return found


def _title(made: dict[str, Any]) -> str:
    return f"{made['kind']} {(made.get('metadata') or {}).get('name', '')}".rstrip()


def _applies_to(patch: dict[str, Any], made: dict[str, Any]) -> bool:
    name = (patch.get("metadata") or {}).get("name")
    return bool(patch["kind"] == made["kind"] and name in (None, made["metadata"]["name"]))


def _merge(made: Any, patch: Any, key: str = "") -> Any:
    if isinstance(made, dict) and isinstance(patch, dict):
        merged = dict(made)
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = _merge(made.get(name), value, name)
        return merged
    if isinstance(patch, list) and (by := _MERGE_BY.get(key)):
        return _merge_list(made or [], patch, by)
    if isinstance(patch, dict):  # nulls of a new map mean nothing
        return {name: _merge(None, value, name) for name, value in patch.items() if value is not None}
    return copy.deepcopy(patch)


def _merge_list(made: list[Any], patch: list[Any], by: str) -> list[Any]:
    merged = list(made)
    for entry in patch:
        if not isinstance(entry, dict) or by not in entry:
            raise JobError(f"--patch: {entry!r} has no {by!r}, by which entries of this list are found")
        at = next((index for index, each in enumerate(merged) if each[by] == entry[by]), None)
        if entry.get(_DIRECTIVE) == "delete":
            merged = [each for each in merged if each[by] != entry[by]]
        elif at is None:
            merged.append(_merge(None, entry))
        else:
            merged[at] = _merge(merged[at], entry)
    return merged
