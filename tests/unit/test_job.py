"""Jobs, job functions and their options: what fits, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.jobs import JobFunction
from taskgraph.options import OptionInfo, help_text


class Fit(tg.Task):
    def __init__(self, task_id: int = -1) -> None:
        self.given = task_id


async def _async_builder(task_id: int) -> tg.Task:
    return Fit(task_id)


def simple(**changes: Any) -> tg.Job:
    return tg.Job(**{"tasks": 3, "builder": Fit, **changes})


# -- Job ----------------------------------------------------------------------------------------------


def test_defaults() -> None:
    job = tg.Job(tasks=3, builder=Fit)
    assert (job.epochs, job.seed, job.name, job.backups, job.min_nodes, job.requires_gpu) == (None, 0, "", 1, 1, False)
    assert isinstance(job.topology, tg.Topology)
    assert job.settings == tg.Settings()


def test_job_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        simple().tasks = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        tg.Job(3, Fit)  # type: ignore[call-arg, misc]


def test_dict_as_topology_and_numpy_ints() -> None:
    job = simple(tasks=np.int64(7), epochs=np.int32(2), topology={"root": lambda i, n, e: (0,)})
    assert job.topology.neighbors("root", 3, 7, 0) == (0,)  # type: ignore[attr-defined]
    assert (type(job.tasks), type(job.epochs)) == (int, int)


@pytest.mark.parametrize("name", ["größe", "日本", "हिन्दी", "fit-1.2_a"])
def test_name_may_have_letters_of_any_language(name: str) -> None:
    assert tg.Job(tasks=1, builder=Fit, name=name).name == name


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tasks": 0}, r"Job\(tasks=0\): must be an int of at least 1"),
        ({"tasks": 1_000_001}, r"Job\(tasks=1000001\): must be 1000000 at most"),
        ({"tasks": 1.5}, r"Job\(tasks=1.5\): must be an int"),
        ({"tasks": True}, r"Job\(tasks=True\): must be an int"),
        ({"tasks": "3"}, r"Job\(tasks='3'\): must be an int"),
        ({"epochs": 0}, r"Job\(epochs=0\): must be None .* or an int of at least 1"),
        ({"backups": -1}, r"Job\(backups=-1\): must be an int of at least 0"),
        ({"backups": 1_001}, r"Job\(backups=1001\): must be 1000 at most"),
        ({"min_nodes": 0}, r"Job\(min_nodes=0\)"),
        ({"checkpoint_every": 0}, r"Job\(checkpoint_every=0\)"),
        ({"seed": None}, r"Job\(seed=None\): must be an int$"),
        ({"name": "two words"}, r"1 to 100 letters \(of any language\), digits"),
        ({"name": ".hidden"}, "no '.' first"),
        ({"name": "x" * 101}, "1 to 100"),
        ({"name": "日" * 67}, "200 bytes at most"),
        ({"name": "größe\udce4"}, "letters"),
        ({"name": "a/b"}, "1 to 100"),
        ({"name": 5}, "1 to 100"),
        ({"builder": None}, r"must be a function \(task_id\) -> tg.Task, not None"),
        ({"builder": Fit()}, r"every task needs an object of its own: builder=Fit"),
        ({"builder": dict}, "dict is no subclass of tg.Task"),
        (
            {"builder": lambda: Fit()},
            r"called with the task id and nothing else, but takes \(\): builder=lambda task_id:",
        ),
        ({"builder": lambda task, rank: Fit(task)}, r"nothing else, but takes \(task, rank\)"),
        ({"builder": _async_builder}, "_async_builder.*plain `def`"),
        ({"topology": tg.tree}, r"call it: tg\.tree\(\)"),
        ({"requires_gpu": "yes"}, r"requires_gpu='yes'\): must be a bool, or a function"),
        ({"settings": {}}, r"takes tg\.Settings\(\.\.\.\), not dict"),
        ({"settings": tg.Settings(min_in_sync=2), "backups": 0}, "set backups to at least 1"),
        ({"checkpoint": "checkpoints"}, "not the whole path of a directory"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        simple(**changes)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: simple(task=2), r"Job\(task=\.\.\.\): Job has no 'task'; did you mean 'tasks'\?"),
        (lambda: simple(frobnicate=2), r"Job has no 'frobnicate'; it takes: tasks, builder, .*, queues$"),
        (lambda: tg.Settings(lease_ttl=5), r"Settings has no 'lease_ttl'; did you mean 'lease_ttl_s'\?"),  # type: ignore[call-arg]
    ],
)
def test_mistyped_name_is_corrected(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        make()


def test_builders() -> None:
    class Named(tg.Task):
        def __init__(self, task_id: int, *, scale: float = 1.0) -> None:
            self.given = task_id

    assert simple(builder=lambda task_id: Fit(task_id)).build(2).given == 2  # type: ignore[attr-defined]
    assert simple(builder=Fit).build(2).given == -1, "an optional argument is the user's"  # type: ignore[attr-defined]
    assert simple(builder=Named).build(2).given == 2  # type: ignore[attr-defined]


def test_builder_class_with_arguments() -> None:
    class Root(tg.Task):
        def __init__(self, length: int, *, scale: float) -> None: ...

    with pytest.raises(
        tg.JobError, match=r"takes length, scale; give them with builder=lambda task_id: Root\(\.\.\.\)"
    ):
        simple(builder=Root)


# -- job functions ------------------------------------------------------------------------------------


@tg.job
def fit(tasks: int = 15, epochs: int | None = None, sizes: list[int] | None = None) -> tg.Job:
    """Fits.

    Args:
        tasks: how many,
            all told.
        epochs (int): how long.
    """
    if sizes is not None:
        sizes.append(0)
    return tg.Job(tasks=tasks, builder=Fit, epochs=epochs, topology=tg.tree())


@tg.job
def scaled(rate: Any) -> tg.Job:
    return tg.Job(tasks=1, builder=lambda task_id: Fit(repr(rate)))  # type: ignore[arg-type]


@tg.job
def needs(tasks, name="x"):  # type: ignore[no-untyped-def]
    return tg.Job(tasks=tasks, builder=Fit, name=name)


@tg.job
def open_ended(tasks: int, **more: int) -> tg.Job:
    return tg.Job(tasks=tasks, builder=Fit, **more)  # type: ignore[arg-type]


@tg.job
def no_job() -> tg.Job:
    return None  # type: ignore[return-value]


def test_job_function_records_its_origin() -> None:
    job = fit(tasks=7)
    assert (job.tasks, job.name) == (7, "fit")
    assert job.origin() == (fit, {"tasks": 7})
    assert fit(7).origin() == (fit, {"tasks": 7}), "arguments by position have names, too"
    assert needs(tasks=3, name="mine").name == "mine"
    assert open_ended(3, seed=5).origin() == (open_ended, {"tasks": 3, "seed": 5})
    assert (fit.__name__, fit.__doc__, fit.__wrapped__().name) == ("fit", fit.__wrapped__.__doc__, "")


def test_plain_job_has_no_origin() -> None:
    with pytest.raises(tg.JobError, match=r"decorate the function that returns it, or run it .* with nodes=0"):
        simple().origin()


def test_nodes_get_the_original_arguments() -> None:
    sizes = [1, 2]
    assert fit(sizes=sizes).origin() == (fit, {"sizes": [1, 2]})


def test_fields_in_the_spec_may_be_replaced() -> None:
    job = dataclasses.replace(fit(), name="other", epochs=3, backups=2, seed=1, settings=tg.Settings(strict=True))
    assert job.origin()[0] is fit


@pytest.mark.parametrize(
    "change",
    [{"tasks": 31}, {"builder": tg.Task}, {"topology": tg.ring()}, {"requires_gpu": True}],
    ids=lambda change: next(iter(change)),
)
def test_other_fields_may_not_be_replaced(change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(tg.JobError, match=rf"made by fit\(\) and then got another {name}; .* a parameter of fit"):
        dataclasses.replace(fit(), **change).origin()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ((1, 2), "not tuple; pass a list"),
        (np.longdouble(1.0), "not longdouble; pass a number"),
        (np.timedelta64(1, "ns"), "not timedelta64; pass a number"),
        pytest.param(10**5000, r"which cannot carry an int this large; pass a text, such as hex\(\)", id="huge"),
        (np.zeros(3), "not ndarray; pass a number, or the name of a file"),
        ([1, {"a": {1, 2}}], "not set"),
        ({1: 2}, "not dict with other keys than str"),
    ],
)
def test_argument_beyond_json_is_named(value: Any, complaint: str) -> None:
    with pytest.raises(tg.JobError, match=rf"fit\(sizes=\.\.\.\): nodes get .* {complaint}"):
        fit(sizes=value)


@pytest.mark.parametrize(
    ("value", "travels_as"),
    [
        (np.float64(0.01), 0.01),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (np.bool_(True), True),
        ([{"rates": [np.float64(0.01)]}], [{"rates": [0.01]}]),
    ],
)
def test_numpy_arguments_become_python_numbers(value: Any, travels_as: Any) -> None:
    job = scaled(rate=value)
    assert repr(job.origin()[1]) == repr({"rate": travels_as})
    assert job.build(0).given == repr(travels_as), "it makes here what nodes make of the same"


@pytest.mark.parametrize("run", [tg.run, tg.arun, tg.testing.run])
def test_uncalled_job_function_is_refused(run: Callable[[Any], object]) -> None:
    with pytest.raises(tg.JobError, match=r"fit is a job function, which makes the job: call it, fit\(\.\.\.\)"):
        run(fit)
    with pytest.raises(tg.JobError, match=r"what is run is a tg\.Job, as .* returns it, not Fit"):
        run(Fit())


def test_unknown_argument_lists_the_known() -> None:
    with pytest.raises(tg.JobError, match=r"fit: .*'taks'; its options are: tasks=15, epochs=None, sizes=None"):
        fit(taks=3)
    with pytest.raises(tg.JobError, match="needs: missing a required argument: 'tasks'; its options are: tasks, name"):
        needs()


def test_job_function_must_return_a_job() -> None:
    with pytest.raises(tg.JobError, match=r"no_job must return a tg\.Job, not NoneType"):
        no_job()


async def _async() -> tg.Job:
    return simple()


def _positional(tasks: int, /) -> tg.Job:
    return simple()


def _starred(*tasks: int) -> tg.Job:
    return simple()


def _nested() -> tg.Job:
    return simple()


_nested.__qualname__ = "outer.<locals>._nested"


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda: None, "top level of a module, not on .*<lambda>"),
        (_nested, r"top level of a module, not on outer\.<locals>\._nested"),
        (Fit.setup, "top level of a module"),
        (Fit, "top level of a module"),
        (5, "top level of a module, not on 5"),
        (_async, "_async: a job function is a plain `def`"),
        (_positional, "_positional: nodes pass .* by name, and tasks has none"),
        (_starred, "by name, and tasks has none"),
    ],
)
def test_uncallable_job_function_is_refused(function: Any, complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        tg.job(function)


# -- options ------------------------------------------------------------------------------------------


def test_options_have_types_and_help() -> None:
    assert fit.options() == {
        "tasks": OptionInfo("tasks", int, 15, False, "how many, all told."),
        "epochs": OptionInfo("epochs", int | None, None, False, "how long."),
        "sizes": OptionInfo("sizes", list[int] | None, None, False),
    }
    assert needs.options()["tasks"].required
    assert list(open_ended.options()) == ["tasks"]


Seconds = NewType("Seconds", float)


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Pair(Enum):
    X = (1, 0)
    Y = (0, 1)


class Level(IntEnum):
    LOW = 1


def _many(
    whole: int = 1,
    real: float = 1.0,
    flag: bool = False,
    text: str = "",
    maybe: int | None = None,
    untyped=None,  # type: ignore[no-untyped-def]
    number=3,
    either: str | int = 0,
    listed: Sequence[float] = (),
    pairs: tuple[int, int] | None = None,
    table: dict[str, int] | None = None,
    choice: Literal["fast", "slow", 0] = "fast",
    anything: Any = None,
    span: Seconds = Seconds(1.0),
    annotated: Annotated[int, "of people"] = 1,
    scalar=np.float32(1),  # type: ignore[no-untyped-def]  # noqa: B008
    count: np.int64 = np.int64(1),  # noqa: B008
    some: Path | int = 0,
    nested: dict[str, list[Literal["a", 1] | None]] | None = None,
    more: tuple[float, ...] = (),
    rates: dict[Literal["x", "y"], float] | None = None,
) -> tg.Job: ...


MANY = JobFunction(_many)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("whole=31", 31),
        ("whole=-1_000", -1000),
        ("whole=0x10", 16),
        ("whole=1e6", 1_000_000),
        ("real=1e-3", 1e-3),
        ("real=2", 2.0),
        ("real=inf", float("inf")),
        ("flag=yes", True),
        ("flag=TRUE", True),
        ("flag=0", False),
        ("text=a=b, c", "a=b, c"),
        ("text=", ""),
        ("text=none", "none"),
        ("maybe=None", None),
        ("maybe=5", 5),
        ("untyped=5", "5"),
        ("untyped=null", None),
        ("number=5", 5),
        ("either=5", 5),
        ("either=five", "five"),
        ("listed=[1, 2.5]", [1, 2.5]),
        ("pairs=[1, 2]", [1, 2]),
        ('table={"a": 1}', {"a": 1}),
        ("choice=slow", "slow"),
        ("choice=0", 0),
        ("anything=[1]", [1]),
        ("anything=as it is", "as it is"),
        ("span=2", 2.0),
        ("annotated=2", 2),
        ("scalar=0.5", 0.5),
        ("count=7", 7),
        ("some=7", 7),
        ('nested={"x": ["a", 1, null], "y": []}', {"x": ["a", 1, None], "y": []}),
        ("more=[1e3]", [1000.0]),
        ('rates={"x": 1}', {"x": 1.0}),
        ("pairs=[1e3, 2]", [1000, 2]),
    ],
)
def test_option_text_becomes_a_value(text: str, value: Any) -> None:
    found = MANY.parse_options([text])[text.partition("=")[0]]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("whole=many", "int"),
        ("whole=1.5", "int"),
        ("whole=", "int"),
        ("whole=inf", "int"),
        ("real=much", "float"),
        ("flag=maybe", "true or false"),
        ("maybe=x", "int or none"),
        ("listed=1,2", "Sequence[float] as JSON"),
        ("listed={}", "Sequence[float] as JSON"),
        ("table=[]", "dict[str, int] as JSON or none"),
        ("choice=medium", "'fast' or 'slow' or 0"),
        ('listed=["a"]', "Sequence[float] as JSON"),
        ("listed=[true]", "Sequence[float] as JSON"),
        ("pairs=[1, 2, 3]", "tuple[int, int] as JSON or none"),
        ("pairs=[1, 2.5]", "tuple[int, int] as JSON or none"),
        ('table={"a": "b"}', "dict[str, int] as JSON or none"),
        ('nested={"x": ["b"]}', "dict[str, list["),
        ('rates={"z": 1}', "dict[Literal['x', 'y'], float] as JSON or none"),
        ("span=x", "float"),
        ("scalar=x", "float"),
    ],
)
def test_bad_option_text_is_refused(text: str, expected: str) -> None:
    name, _, value = text.partition("=")
    with pytest.raises(tg.JobError, match=re.escape(f"option {name}='{value}': expected {expected}")):
        MANY.parse_options([text])


def _unusable(
    mode: Mode = Mode.FAST,
    implied=Mode.FAST,  # type: ignore[no-untyped-def]
    pair: Pair = Pair.X,
    level: Level | None = None,
    where: Path = Path(),
    names: set[str] | None = None,
    modes: list[Mode] | None = None,
    table: dict[int, float] | None = None,
    price: Decimal = Decimal(1),
    raw: bytes = b"",
    some: Path | int = 0,
) -> tg.Job: ...


@pytest.mark.parametrize(
    ("text", "annotation", "instead"),
    [
        ("mode=fast", "Mode", "Literal['fast', 'slow'], and call Mode(...) in the function"),
        ("implied=zzz", "Mode", "Literal['fast', 'slow'], and call Mode(...) in the function"),
        ("pair=X", "Pair", "Literal['X', 'Y'], and use Pair[...] in the function"),
        ("level=1", "test_job.Level | None", "Literal[1], and call Level(...) in the function"),
        ("where=/tmp", "Path", "str, and call Path(...) in the function"),
        ('names=["a"]', "set[str] | None", "list[str], and call set(...) in the function"),
        ('modes=["fast"]', "list[test_job.Mode] | None", "Literal['fast', 'slow'], and call Mode(...)"),
        ('table={"1": 2}', "dict[int, float] | None", "dict[str, ...]: JSON has no other keys"),
        ("price=1.5", "Decimal", "bool, int, float, str, Literal[...], list[...], dict[str, ...]"),
        ("raw=x", "bytes", "bool, int, float, str, Literal[...], list[...], dict[str, ...]"),
        ("some=x", f"{Path.__module__}.Path | int", "str, and call Path(...) in the function"),
    ],
)
def test_option_type_beyond_json_is_refused(text: str, annotation: str, instead: str) -> None:
    """`-o` must not give a function what its annotation does not say; from Python these are refused as well."""
    name, _, value = text.partition("=")
    said = f"option {name}={value!r}: its annotation is {annotation}, and nodes get a job's arguments as JSON: annotate"
    with pytest.raises(tg.JobError, match=re.escape(said) + r".* with " + re.escape(instead)):
        JobFunction(_unusable).parse_options([text])


def test_help_names_unusable_options() -> None:
    lines = help_text(JobFunction(_unusable).options()).splitlines()
    assert [line.split()[1] for line in lines if "(cannot be given)" not in line] == ["some=0"]
    assert "(cannot be given)" not in help_text(MANY.options())


def test_enum_argument_is_refused() -> None:
    with pytest.raises(tg.JobError, match=r"not Mode; pass its value, and call Mode\(\.\.\.\) in the function"):
        fit(sizes=Mode.FAST)


def test_options_are_found_by_their_names() -> None:
    assert fit.parse_options(["tasks=3", "epochs=2", "tasks=5"]) == {"tasks": 5, "epochs": 2}
    assert fit.parse_options([]) == {}
    with pytest.raises(
        tg.JobError, match=r"fit has no option 'taks' \(did you mean 'tasks'\?\); its options are: tasks"
    ):
        fit.parse_options(["taks=3"])
    with pytest.raises(tg.JobError, match="fit has no option 'zzz'; its options are"):
        fit.parse_options(["zzz=3"])
    with pytest.raises(tg.JobError, match=r"'tasks': write -o name=value; the options of .* are: .*tasks="):
        fit.parse_options(["tasks"])


def test_requires_gpu_is_computed_once() -> None:
    asked: list[int] = []

    def needs(task_id: int) -> bool:
        asked.append(task_id)
        return {0: False}[task_id]

    with pytest.raises(tg.JobError, match=r"requires_gpu=\.\.\.\): for task 1 it raises KeyError: 1"):
        tg.Job(tasks=2, epochs=1, builder=tg.Task, requires_gpu=needs)
    assert asked == [0, 1]
    made = tg.Job(tasks=2, epochs=1, builder=tg.Task, requires_gpu=lambda task_id: task_id == 1)
    assert [made.needs_device(task) for task in range(2)] == [False, True]
