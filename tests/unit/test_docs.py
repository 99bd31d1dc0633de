"""The pages in docs/ speak of what is there: files, names in them, every module, every link."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from taskgraph.driver.sources import parse_source

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "taskgraph"
DOCS = {page.name: page for page in sorted((ROOT / "docs").glob("*.md"))}
OURS = ("architecture.md", "protocol.md", "index.md")  # in these, names in backticks are held to the code, too

# `node/primary/leader.py: LeaderRole._commit`, `taskgraph/protocol/sums.py`, `tests/protocol/`, `docs/frames.md`
REFERENCE = re.compile(r"`([\w./-]+(?:\.py|\.proto|\.md|\.toml|/))(?:: ([\w.]+))?`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: str) -> str:
    """The page without its diagrams and code blocks."""
    return re.sub(r"```.*?```", "", DOCS[page].read_text("utf-8"), flags=re.S)


def find(path: str) -> Path | None:
    """A path as the pages write it: from the root, or from the package."""
    return next((base / path for base in (ROOT, PACKAGE) if (base / path).exists()), None)


@cache
def names(path: Path) -> frozenset[str]:
    """Every class, function, attribute and constant of a module, with the class they are in."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef():
                    found.add(prefix + node.name)
                    visit(node.body, f"{prefix}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(prefix + node.name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)
                case ast.Assign():
                    found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
                case _:
                    pass

    visit(parse_source(path).body, "")
    return frozenset(found)


def references() -> Iterator[tuple[str, str, str]]:
    for page in DOCS:
        for path, name in REFERENCE.findall(prose(page)):
            if "/" in path or page in OURS:
                yield page, path, name


@pytest.mark.parametrize("page", DOCS)
def test_files_and_names_in_them_exist(page: str) -> None:
    missing = []
    for where, path, name in references():
        if where != page or path.startswith(("http", "/")):
            continue
        found = find(path)
        if found is None:
            missing.append(path)
        elif name and name not in names(found):
            missing.append(f"{path}: {name}")
    assert not missing, f"docs/{page} speaks of what is not there: {missing}"


def test_pages_refer_to_code() -> None:
    """So that a change of how they are written does not empty the test above."""
    assert sum(1 for page, _, name in references() if page in OURS and name) > 60


def modules() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        generated = path.name.endswith("_pb2.py") or "_proto" in path.parts
        if path.name != "__init__.py" and not generated:
            yield path.relative_to(PACKAGE).as_posix()


def rooms() -> dict[str, str]:
    """Module -> its line, from the tables of the section "The rooms"."""
    section = DOCS["architecture.md"].read_text("utf-8").split("\n## The rooms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \|$", section, re.M)
    assert len(rows) == len({path for path, _ in rows}), "a module is in one row"
    return dict(rows)


def test_every_module_has_a_row() -> None:
    assert sorted(rooms()) == sorted(modules())
    assert all(rooms().values())


def test_package_docstrings_name_modules() -> None:
    """In what a package says of itself at its top, a small name in backticks is a module: of its own, or of ours."""
    missing, found = [], 0
    for path in sorted(PACKAGE.rglob("__init__.py")):
        if "_proto" in path.parts:
            continue
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", ast.get_docstring(parse_source(path)) or ""):
            if name == "taskgraph" or name.startswith("tg."):
                continue
            found += 1
            inner = name.removeprefix("taskgraph.").replace(".", "/")
            places = (base / inner for base in (path.parent, PACKAGE))
            if not any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
                missing.append(f"{path.parent.name}: {name}")
    assert not missing and found > 20, missing


@pytest.mark.parametrize("page", DOCS)
def test_rows_of_tables_are_lines(page: str) -> None:
    assert not re.findall(r"^.*\| \|-+\|.*$", prose(page), re.M), "a table is wrapped as text"


@pytest.mark.parametrize("page", DOCS)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = DOCS[page].parent / path if path else DOCS[page]
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"docs/{page} has links that lead nowhere: {broken}"


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_index_has_every_page() -> None:
    linked = {target for target in LINK.findall(prose("index.md")) if "/" not in target}
    assert linked == DOCS.keys() - {"index.md"}


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    declared = {re.split(r"[<>=;\[ ]", dependency)[0] for dependency in wanted}
    section = DOCS["architecture.md"].read_text("utf-8").split("\n## Dependencies\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \| .+ \|$", section, re.M)
    assert declared == {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell.split(" (")[0])}


def test_table_of_keys_is_complete() -> None:
    source = (PACKAGE / "protocol" / "keys.py").read_text("utf-8")
    parts = set(re.findall(r"self\.root \+ \"([a-z]+)", source)) | set(re.findall(r"/(primary|members)", source))
    section = DOCS["protocol.md"].read_text("utf-8").split("\n## Keys\n")[1].split("\n## ")[0]
    written = {word for row in re.findall(r"^\| (`.+?) \|", section, re.M) for word in re.findall(r"[a-z]+", row)}
    assert parts <= written


def test_messages_and_refusals_are_documented() -> None:
    source = (PACKAGE / "protocol" / "messages.py").read_text("utf-8")
    calls = re.search(r"^Call = (\(.+?^\)|.+?$)", source, re.M | re.S)
    reasons = re.findall(r"^    [A-Z_]+ = \"([a-z ]+)\"", source, re.M)
    assert calls is not None and len(reasons) > 10
    text = DOCS["protocol.md"].read_text("utf-8")
    assert not [name for name in re.findall(r"\w+", calls[1]) if f"`{name}`" not in text]
    assert not [reason for reason in reasons if f"`{reason}`" not in text]


def test_referenced_tests_exist() -> None:
    """`test_...` in backticks is a test function somewhere below tests/."""
    named = {name for page in DOCS for name in re.findall(r"`(test_\w+)`", prose(page))}
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^\s*(?:async )?def (test_\w+)", source, re.M))
    assert len(named) > 20
    assert not named - there


def imports(package: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """(room, room it imports): packages and modules right below `package`; `TYPE_CHECKING` imports aside."""
    prefix = ".".join(package.relative_to(PACKAGE.parent).parts) + "."
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        room = parts[0].removesuffix(".py")
        if room == "__init__":
            continue  # it gathers the public names
        pending: list[ast.AST] = [parse_source(path)]
        while pending:
            for node in ast.iter_child_nodes(pending.pop()):
                if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                    continue
                if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(prefix):
                    below = f"{node.module}.".removeprefix(prefix).split(".")[0]
                    for other in [below] if below else [alias.name for alias in node.names]:
                        if other != room:
                            yield room, other
                pending.append(node)


def test_imports_go_where_the_diagram_points() -> None:
    section = DOCS["architecture.md"].read_text("utf-8").split("\n## The rooms\n")[1].split("```mermaid")[1]
    diagram = section.split("```")[0]
    box = dict(re.findall(r"(\w+)\[([^\]]+)\]", diagram))
    arrows = {
        tuple(re.findall(r"^\w+|\w+$", re.sub(r"\[.*?\]", "", line.strip()))) for line in diagram.splitlines()[2:]
    }
    below: dict[str, set[str]] = {}
    for arrow in arrows:
        if arrow:
            below.setdefault(arrow[0], set()).add(arrow[1])
    where = {room: node for node, label in box.items() for room in label.split(", ")}

    def reach(node: str) -> set[str]:
        found: set[str] = set()
        pending = [node]
        while pending:
            for other in below.get(pending.pop(), ()):
                if other not in found:
                    found.add(other)
                    pending.append(other)
        return found

    boxes = below.keys() | {other for others in below.values() for other in others}
    assert not [node for node in boxes if node in reach(node)], "imports point downwards only"
    drawn = {node: reach(node) | {node} for node in boxes}
    astray = {(room, to) for room, to in imports() if where.get(to, to) not in drawn.get(where.get(room, room), set())}
    assert not astray, f"docs/architecture.md does not draw these imports: {sorted(astray)}"


def test_rooms_of_a_node_import_one_way() -> None:
    """As `taskgraph/node/__init__.py` says. What all of them use lies beside them."""
    may = {
        "primary": {"epochs", "membership", "usercode"},
        "epochs": {"usercode"},
        "membership": {"usercode"},
        "usercode": set(),
    }
    found = {(room, to) for room, to in imports(PACKAGE / "node") if room in may}
    beside = {"backoff", "core", "replica", "reports", "router", "snapshots"}
    assert len(found) > 5
    assert not {(room, to) for room, to in found if to not in may[room] | beside}


def test_known_import_cycles() -> None:
    """What they import for types alone is looked at, too: no part of a node says of itself that it takes all of it."""
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    named: dict[str, set[str]] = {}
    for module, path in modules.items():
        froms = [node for node in ast.walk(parse_source(path)) if isinstance(node, ast.ImportFrom) and node.module]
        whole = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        named[module] = (whole | {str(node.module) for node in froms}) & modules.keys() - {module}
    assert "taskgraph.node.services" in named["taskgraph.node.primary.primary"]

    def reach(module: str) -> set[str]:
        found, pending = set[str](), [module]
        while pending:
            news = named[pending.pop()] - found
            found |= news
            pending += news
        return found

    reached = {module: reach(module) for module in modules}
    circles = {frozenset(m for m in reached[n] if n in reached[m]) for n in modules if n in reached[n]}
    short = {frozenset(name.removeprefix("taskgraph.node.") for name in circle) for circle in circles}
    assert short == {
        frozenset({"primary.primary", "epochs.lanes"}),  # a primary, and its epochs
        frozenset(f"epochs.{name}" for name in ("attempt", "attempts", "inbound", "messenger", "primary_interface")),
        frozenset({"usercode.actor", "usercode.coroutines"}),
    }


WORDS = ("told", "nobody", "whoever", "any more", "so many")
"""Words of a former dialect: each may be in the package fewer than 40 times, in the pages fewer than 10 times."""


def test_package_is_in_plain_english() -> None:
    code = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)
    found = {word: len(re.findall(rf"\b{word}\b", code, re.I)) for word in WORDS}
    assert {word: count for word, count in found.items() if count >= 40} == {}
    assert len(re.findall(r'"""The same\b', code)) < 40


def test_pages_are_in_plain_english() -> None:
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "README.md", *DOCS.values()))
    found = {word: len(re.findall(rf"\b{word}\b", text, re.I)) for word in (*WORDS, "whomever", "somebody")}
    assert {word: count for word, count in found.items() if count >= 10} == {}
