"""What a task class may look like, and what is said about one that may not."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.shape import HandlerInfo, is_stateless
from taskgraph.task import shape_of


def make(state: Any = (), bases: tuple[type, ...] = (tg.Task,), **members: Any) -> type[tg.Task]:
    """`class Fit(*bases, state=state)` with these members."""
    return type("Fit", bases, members, state=state)  # type: ignore[call-overload, no-any-return]


# -- state --------------------------------------------------------------------------------------------


def test_subclass_adds_to_the_state() -> None:
    class A(tg.Task, state=["theta"]):
        pass

    class B(tg.Task, state=("seen",)):
        pass

    class Both(A, B, state=["theta", "step"]):
        pass

    task = Both()
    task.restore({"theta": 1, "seen": 2, "step": 3})
    assert set(task.snapshot()) == {"theta", "seen", "step"}
    assert shape_of(Both).stateful
    assert list(A.__taskgraph_state__) == ["theta"], "a base is not changed by its subclasses"


def test_dataclass_with_slots_keeps_its_state() -> None:
    class Base(tg.Task, state=["seen"]):
        pass

    @dataclasses.dataclass(slots=True)  # makes the class once more, without `state=`
    class Fit(Base, state=["theta"]):
        theta: int = 0

    task = Fit(5)
    task.seen = 2  # type: ignore[attr-defined]
    assert shape_of(Fit).stateful
    assert task.snapshot() == {"seen": 2, "theta": 5}


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ("theta", r"state takes a list of names: state=\['theta'\]"),
        ({"a", "b"}, "state takes a list of names"),
        (5, "state takes a list of names"),
        (["two words"], "'two words' is no attribute name"),
        (["class"], "'class' is no attribute name"),
        ([3], "3 is no attribute name"),
        (["a", "b", "a"], "twice"),
        (["task_id"], "'task_id' is set by the framework"),
        (["snapshot"], "'snapshot' is a method"),
        (["helper"], "'helper' is a method"),
        (["__theta"], "call it 'theta' or '_theta'"),
    ],
)
def test_bad_state_is_refused(state: Any, complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint) as refused:
        make(state, helper=lambda self: None)
    assert "class Fit" in str(refused.value)


@pytest.mark.parametrize("keywords", [{"states": ["theta"]}, {"State": ["theta"], "seed": 1}])
def test_mistyped_class_keyword_is_named(keywords: dict[str, Any]) -> None:
    class Mixin:
        pass

    for bases in ((tg.Task,), (Mixin, tg.Task), (tg.Task, Mixin)):
        with pytest.raises(tg.JobError) as refused:
            type("Fit", bases, {}, **keywords)
        names = ", ".join(map(repr, keywords))
        assert str(refused.value) == f"class Fit: tg.Task takes state=[...] and shared=[...], not {names}"


@pytest.mark.parametrize("first", [True, False])
def test_mixins_take_keywords(first: bool) -> None:
    class Mixin:
        flavor = ""

        def __init_subclass__(cls, flavor: str = "", **others: Any) -> None:
            super().__init_subclass__(**others)
            cls.flavor = flavor

    fit: Any = type("Fit", (Mixin, tg.Task) if first else (tg.Task, Mixin), {}, flavor="sweet", state=["theta"])
    assert (fit.flavor, fit.__taskgraph_state__) == ("sweet", ("theta",))
    with pytest.raises(tg.JobError if first else TypeError):
        type("Fit", fit.__bases__, {}, flavor="sweet", states=["theta"])


def test_restore_inverts_snapshot() -> None:
    class Fit(tg.Task, state=["theta", "step"]):
        def setup(self) -> None:
            self.theta, self.step = np.zeros(3), 7

    one, other = Fit(), Fit()
    one.setup()
    assert one.snapshot()["theta"] is one.theta, "no copy: it is encoded before anything else runs"
    other.restore(one.snapshot())
    assert (other.theta is one.theta, other.step) == (True, 7)


def test_snapshot_without_state() -> None:
    task = make()()
    assert task.snapshot() is None
    task.restore(None)


def test_unset_state_is_named() -> None:
    task = make(["theta"])()
    with pytest.raises(tg.StateError, match=r"declares state 'theta'.*set self\.theta in setup\(\)"):
        task.snapshot()
    task.task_id = 3
    with pytest.raises(tg.StateError, match=r"task 3 \(Fit\)"):
        task.snapshot()


def test_class_default_is_state() -> None:
    assert make(["step"], step=0)().snapshot() == {"step": 0}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"theta": 1}, "lacks 'step'"),
        ({"theta": 1, "step": 2, "more": 3}, "holds undeclared 'more'"),
        ({"theta": 1, "more": 3}, "lacks 'step' and holds undeclared 'more'"),
        (None, "lacks 'theta', 'step'"),
        ([1, 2], "takes a dict, not list"),
    ],
)
def test_snapshot_that_does_not_fit_is_refused(given: Any, complaint: str) -> None:
    task = make(["theta", "step"])()
    with pytest.raises(tg.StateError, match=complaint):
        task.restore(given)
    assert not vars(task)


# -- what the framework sets --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["task_id", "tasks", "log", "primary", "xp"])
def test_reading_an_attribute_too_early(name: str) -> None:
    class Eager(tg.Task):
        def __init__(self) -> None:
            self.kept = getattr(self, name)

    with pytest.raises(tg.JobError, match=rf"Eager\.{name} is set after the task is built: read it in setup\(\)"):
        Eager()
    assert not hasattr(tg.Task(), name)


def test_state_property_needs_a_setter() -> None:
    task = make(["loss"], loss=property(lambda self: 0.5))()
    with pytest.raises(
        tg.StateError, match="state 'loss' is a property that cannot be set: declare what it is made of"
    ):
        task.restore(task.snapshot())


def test_error_in_a_setter_is_the_users() -> None:
    def refuses(self: Any, value: Any) -> None:
        raise AttributeError("mine")

    task = make(["loss"], loss=property(lambda self: 0.5, refuses))()
    with pytest.raises(AttributeError, match=r"^mine$"):
        task.restore(task.snapshot())


def test_error_in_a_property_is_the_users() -> None:
    class Fit(tg.Task):
        @property
        def rows(self) -> int:
            return (5).length  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'int' object has no attribute 'length'"):
        _ = Fit().rows


def test_task_needs_compose() -> None:
    with pytest.raises(tg.JobError, match=r"class Fit must define compose\(self, epoch\)"):
        make()().compose(None)  # type: ignore[arg-type]


# -- hooks and handlers -------------------------------------------------------------------------------


def test_overridden_hooks_are_found() -> None:
    class Mixin:
        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None: ...

    class Fit(Mixin, tg.Task):
        def snapshot(self) -> int:
            return 1

        def restore(self, state: Any) -> None: ...

        async def setup(self) -> None: ...

    shape = shape_of(Fit)
    assert shape.stateful, "it overrides snapshot"
    assert shape.receives, "it overrides on_flag"
    assert shape.overrides == {"on_flag", "snapshot", "restore", "setup"}


def test_handlers_are_found() -> None:
    class Server(tg.Task):
        @tg.handles("push")
        async def take(self, epoch: tg.Epoch, sender: int, payload: Any) -> None: ...

        @tg.handles("pull", pure=True)
        def give(self, epoch: tg.Epoch, sender: int, payload: Any) -> int:
            return 1

    shape = shape_of(Server)
    assert shape.receives
    assert shape.handlers == {
        "push": HandlerInfo("take", pure=False),
        "pull": HandlerInfo("give", pure=True),
    }
    with pytest.raises(TypeError):
        shape.handlers["x"] = HandlerInfo("y", False)  # type: ignore[index]


def test_subclass_overrides_a_handler() -> None:
    class Base(tg.Task):
        @tg.handles("push")
        def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any: ...

    class Keeps(Base):
        async def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> None: ...

    class Changes(Base):
        @tg.handles("give", pure=True)
        def push(self, epoch: tg.Epoch, sender: int, payload: Any) -> None: ...

    assert shape_of(Keeps).handlers == {"push": HandlerInfo("push", pure=False)}
    assert shape_of(Changes).handlers == {"give": HandlerInfo("push", pure=True)}
    assert not shape_of(make(bases=(Base,), push=None)).receives


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@pytest.mark.parametrize("first", [True, False])
def test_static_and_class_handlers(kind: Any, first: bool) -> None:
    """Below @staticmethod the mark was lost, and who sent the request was told to add it."""

    def push(*args: Any) -> int:
        return len(args)

    mark = tg.handles("push", pure=True)
    fit = make(push=mark(kind(push)) if first else kind(mark(push)))
    assert shape_of(fit).handlers == {"push": HandlerInfo("push", True)}


def test_handler_has_one_request() -> None:
    """One of them was dropped without a word, and who sent it was told to add what was there."""
    with pytest.raises(tg.JobError, match="push handles 'pull' and cannot handle 'push', too: give that a method of"):

        class Fit(tg.Task):
            @tg.handles("push")
            @tg.handles("pull")
            def push(self, epoch: Any, sender: int, payload: Any) -> None: ...

    with pytest.raises(tg.JobError, match="<lambda> handles 'pull' and cannot handle 'push', too"):
        tg.handles("push")(staticmethod(tg.handles("pull")(lambda: None)))


def test_wrapped_handler_may_be_marked() -> None:
    class Fit(tg.Task):
        @tg.handles("push")
        def push(self, epoch: Any, sender: int, payload: Any) -> None: ...

        @tg.handles("pull", pure=True)
        @functools.wraps(push)
        def pull(self, epoch: Any, sender: int, payload: Any) -> None: ...

        @tg.handles("again", pure=True)
        @tg.handles("again")
        def again(self, epoch: Any, sender: int, payload: Any) -> None: ...

    assert {name: info.pure for name, info in shape_of(Fit).handlers.items()} == {
        "push": False,
        "pull": True,
        "again": True,
    }


def test_request_has_one_handler() -> None:
    def one(self: Any, epoch: Any, sender: Any, payload: Any) -> None: ...
    def other(self: Any, epoch: Any, sender: Any, payload: Any) -> None: ...

    with pytest.raises(tg.JobError, match="methods 'one' and 'other' both handle 'push'"):
        make(one=tg.handles("push")(one), other=tg.handles("push")(other))


@pytest.mark.parametrize("name", ["", None, lambda self: None])
def test_handler_needs_a_name(name: Any) -> None:
    with pytest.raises(tg.JobError, match=r"@tg\.handles\('push'\)"):
        tg.handles(name)


async def _async(self: Any, *_: Any) -> None: ...


def _generator(self: Any, *_: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"snapshot": _async, "restore": lambda self, state: None}, "snapshot must be a plain `def`"),
        ({"snapshot": lambda self: 1, "restore": _async}, "restore must be a plain `def`"),
        ({"result": _async}, "result must be a plain `def`"),
        ({"snapshot": lambda self: 1}, "overrides snapshot but not restore"),
        ({"restore": lambda self, state: None}, "overrides restore but not snapshot"),
        ({"setup": _generator}, "setup has a `yield`"),
        ({"setup": 5}, "setup must be a method, not int"),
        ({"compose": lambda self: None}, r"compose is called as compose\(self, epoch\), but takes \(self\)"),
        ({"on_flag": lambda self, sender: None}, r"called as on_flag\(self, epoch, sender, meta\)"),
        ({"push": tg.handles("push")(lambda self, payload: 1)}, r"called as push\(self, epoch, sender, payload\)"),
        ({"setup": tg.handles("push")(lambda self: None)}, "setup is a hook and cannot handle 'push'"),
    ],
)
def test_hook_with_wrong_parameters_is_refused(members: dict[str, Any], complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint) as refused:
        make(**members)
    assert "class Fit" in str(refused.value)


def test_restore_may_be_overridden_alone() -> None:
    class Fit(tg.Task, state=["w", "steps"]):
        def restore(self, state: Any) -> None:
            super().restore({"steps": 0, **state})  # an earlier version had none
            self.double = 2 * self.w

    task = Fit()
    task.restore({"w": 4})
    assert task.snapshot() == {"w": 4, "steps": 0}
    assert task.double == 8

    class Child(Fit):
        def restore(self, state: Any) -> None:
            super().restore(state)

    with pytest.raises(tg.JobError, match="overrides snapshot but not restore"):

        class Half(tg.Task, state=["w"]):
            def snapshot(self) -> Any:
                return 1


@pytest.mark.parametrize(
    ("name", "parameters", "meant"),
    [
        ("composse", "epoch", "compose"),
        ("on_flags", "epoch, sender, meta", "on_flag"),
        ("set_up", "", "setup"),
        ("reslut", "", "result"),
        ("on_comit", "number, state", "on_commit"),
        ("tear_down", "", "teardown"),
    ],
)
def test_misspelt_hook_is_named(name: str, parameters: str, meant: str) -> None:
    function = eval(f"lambda self, {parameters}: None")
    with pytest.raises(tg.JobError, match=f"class Fit: {name} is no hook and would not be called: .* mean {meant}"):
        make(**{name: function})
    make(**{name: function, meant: function})  # then it is a method of its own
    make(**{f"_{name}": function})
    make(**{name: property(function)})
    make(**{name: tg.handles("x")(lambda self, epoch, sender, payload: None)})


def test_similar_names_are_free() -> None:
    def compute(self: Any, epoch: Any, ins: Any, outs: Any) -> None: ...

    names = ("commit", "results", "composed", "restored", "setup_data", "reset", "restart", "resume", "compute", "step")
    make(**dict.fromkeys(names, compute))


def test_hooks_may_take_defaults_and_anything() -> None:
    make(compose=lambda self, epoch, how="fast": None, on_flag=lambda self, *args: None)


# -- events and shards --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        tg.BecamePrimary(term=2),
        tg.BecameBackup(term=3),
        tg.NeighborFailed(task=1, link="children"),
        tg.NeighborRestarted(task=1, term=2, link="children"),
    ],
)
def test_events_are_values(event: tg.Event) -> None:
    assert isinstance(event, tg.Event)
    assert event == dataclasses.replace(event)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(event)[0].name, 5)


@pytest.mark.parametrize("n", [0, 1, 2, 6, 7, 100, 327_346])
@pytest.mark.parametrize("tasks", [1, 2, 7, 31])
def test_shards_are_balanced(n: int, tasks: int) -> None:
    shards = [range(n)[tg.shard(n, task, tasks)] for task in range(tasks)]
    assert [row for part in shards for row in part] == list(range(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_shards_of_numpy_integers() -> None:
    big = np.int64(2**62)
    assert tg.shard(big, np.int64(6), np.int64(7)).stop == 2**62  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((10, 3, 3), "there is no task 3 among 3"),
        ((10, -1, 3), "there is no task -1"),
        ((10, 0, 0), "there is no task 0 among 0"),
        ((-1, 0, 1), "-1 rows cannot be split"),
        ((10.5, 0, 1), "takes ints"),
    ],
)
def test_bad_shards_are_refused(arguments: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        tg.shard(*arguments)


# -- what is stateless --------------------------------------------------------------------------------


def test_partial_of_a_stateless_compute() -> None:
    """A compute for each of several shards is no other code than the method it is made of."""

    class Fit(tg.Task):
        @tg.stateless
        def early(self, shard: int, epoch: Any, ins: Any, outs: Any) -> None:
            pass

        def late(self, shard: int, epoch: Any, ins: Any, outs: Any) -> None:
            pass

    assert is_stateless(functools.partial(Fit().early, 1))
    assert not is_stateless(functools.partial(Fit().late, 1))


def works(self: Any, epoch: Any, *rest: Any) -> None:
    """A hook or a handler."""


def marked(self: Any, epoch: Any, *rest: Any) -> None:
    """A hook or a handler, marked."""


tg.stateless(marked)


@pytest.mark.parametrize("given", [None, "early", 3, staticmethod(works), classmethod(works), Any])
def test_stateless_marks_methods_only(given: Any) -> None:
    with pytest.raises(tg.JobError, match=r"@tg\.stateless stands before a method, without parentheses; it was given"):
        tg.stateless(given)


def test_stateless_takes_no_parentheses() -> None:
    with pytest.raises(tg.JobError, match="without parentheses"):

        @tg.stateless()
        def early(self: Any, epoch: Any) -> None:
            """It is never marked."""


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("setup", lambda self: None),
        ("snapshot", lambda self: None),
        ("restore", lambda self, state: None),
        ("result", lambda self: None),
        ("on_flag", lambda self, epoch, sender, meta: None),
        ("on_commit", lambda self, number, state: None),
        ("on_event", lambda self, event: None),
        ("teardown", lambda self: None),
    ],
)
def test_stateless_on_other_hooks_is_refused(name: str, hook: Any) -> None:
    both = (
        {"snapshot": lambda self: None, "restore": lambda self, state: None} if name in ("snapshot", "restore") else {}
    )
    with pytest.raises(tg.JobError) as refused:
        make(**{**both, name: tg.stateless(hook)})
    assert str(refused.value) == (
        f"class Fit: {name} is a hook, which no epoch calls early: @tg.stateless marks compose and computes"
    )


@pytest.mark.parametrize("inherited", [False, True])
def test_stateless_on_handlers_is_refused(inherited: bool) -> None:
    def push(self: Any, epoch: Any, sender: int, payload: Any) -> None:
        """In the subclass it stays a handler, by the mark of its base."""

    bases = (make(push=tg.handles("push")(lambda self, epoch, sender, payload: None)),) if inherited else (tg.Task,)
    given = tg.stateless(push) if inherited else tg.stateless(tg.handles("push")(push))
    with pytest.raises(tg.JobError, match="class Fit: push is a handler, which no epoch calls early"):
        make(bases=bases, push=given)


def test_which_tasks_have_epochs_in_flight() -> None:
    handler = tg.handles("push")(lambda self, epoch, sender, payload: None)
    assert not shape_of(tg.Task).in_flight
    assert not shape_of(make(compose=works)).in_flight
    assert not shape_of(make(compose=works, early=marked)).in_flight, "computes alone are not enough"
    flying = make(compose=marked)
    assert shape_of(flying).in_flight
    assert shape_of(make(compose=marked, setup=lambda self: None, on_event=lambda self, event: None)).in_flight
    assert not shape_of(make(compose=marked, push=handler)).in_flight
    assert not shape_of(make(compose=marked, on_flag=lambda self, epoch, sender, meta: None)).in_flight
    assert not shape_of(make(compose=marked, on_commit=lambda self, number, state: None)).in_flight
    # A subclass inherits the mark with the method, and not where it writes another one.
    assert shape_of(make(bases=(flying,))).in_flight
    assert not shape_of(make(bases=(flying,), push=handler)).in_flight
    assert not shape_of(make(bases=(flying,), compose=works)).in_flight
    assert shape_of(make(bases=(make(bases=(flying,), compose=works),), compose=marked)).in_flight
