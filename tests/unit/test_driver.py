"""Drivers: found by file or module, loaded the same in every process, and refused by name where they cannot be."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.driver.loading import DriverRef, load_driver, make_job, reference_of
from taskgraph.driver.sources import fingerprint
from taskgraph.driver.spec import JobSpec
from taskgraph.version import PROTOCOL

HEAD = "import taskgraph as tg\n"
FIT = """
@tg.job
def fit(tasks=3, epochs=4):
    return tg.Job(tasks=tasks, epochs=epochs, builder=tg.Task)
"""


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert sys.modules["numpy"] is np, "it cannot be loaded twice: what imports it below finds it"
    assert all(getattr(tg, name) for name in tg.__all__), "taskgraph loads these late: each test would have its own"
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str = FIT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + text)
    return path


def python(*arguments: str, cwd: Path) -> str:
    """What another Python process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- finding and loading ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fit_a.py", "fit_a.py:fit", "./fit_a.py:", "fit_a", "fit_a:fit"])
def test_a_driver_is_named_by_file_or_module_and_perhaps_function(text: str, tmp_path: Path) -> None:
    write(tmp_path / "fit_a.py")
    assert load_driver(text)(tasks=5).tasks == 5


def test_a_module_in_a_package(tmp_path: Path) -> None:
    write(tmp_path / "proj_a" / "__init__.py", "")
    write(tmp_path / "proj_a" / "fit.py")
    assert load_driver("proj_a.fit:fit").__name__ == "fit"


def test_one_file_is_one_module_however_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / "fit_b.py")
    assert load_driver("fit_b.py") is load_driver(str(tmp_path / "fit_b.py")) is load_driver("fit_b")


def test_neighbors_of_a_driver_are_imported_as_when_it_runs_by_itself(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "helper_c.py", "import fit_c\nTASKS = 7\n")
    write(tmp_path / "deep" / "fit_c.py", "import helper_c\n" + FIT.replace("tasks=3", "tasks=helper_c.TASKS"))
    function = load_driver("deep/fit_c.py")
    assert function().tasks == 7
    assert sys.modules["helper_c"].fit_c.fit is function, "what a neighbor imports is the driver itself"


@pytest.mark.parametrize("name", ["fit.v2.py", ".fit.py", "json.v2.py"])
def test_a_driver_with_a_dot_in_its_name_is_found_again_by_its_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    ref = reference_of(function := load_driver(str(path)))
    assert (ref.kind, ref.location) == ("file", str(path))
    assert ref.load() is function


def test_a_driver_is_loaded_where_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch systems remove their scratch; nodes that come later run there all the same."""
    path = write(tmp_path / "fit_gone.py")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert DriverRef("file", str(path), "fit").load()().name == "fit"
    assert DriverRef("module", "fit_gone", "fit", root=str(tmp_path)).load()().name == "fit"
    with pytest.raises(tg.JobError, match=r"and no none\.py in the working directory, which was removed"):
        DriverRef("file", "/nowhere/none.py", "fit").load()


@pytest.mark.parametrize(
    ("imports", "package"), [("from . import util", True), ("from . import util", False), ("from pk import util", True)]
)
def test_a_file_in_a_package_is_to_be_named_as_a_module(imports: str, package: bool, tmp_path: Path) -> None:
    write(tmp_path / "pk" / "d.py", f"{imports}\n{FIT}")
    write(tmp_path / "pk" / "util.py", "")
    if package:
        write(tmp_path / "pk" / "__init__.py", "")
    hint = re.escape(f"what is in a package is named as a module: `taskgraph run pk.d`, in {tmp_path}")
    with pytest.raises(tg.JobError, match=hint):
        load_driver("pk/d.py")
    assert load_driver("pk.d")().name == "fit"


def test_of_a_module_that_is_missing_a_package_is_not_blamed(tmp_path: Path) -> None:
    write(tmp_path / "pk" / "__init__.py", "")
    write(tmp_path / "pk" / "d.py", f"import none_such\n{FIT}")
    with pytest.raises(tg.JobError, match="No module named 'none_such'") as caught:
        load_driver("pk/d.py")
    assert "package" not in str(caught.value)


@pytest.mark.parametrize("name", ["json", "random", "numpy"])
def test_a_driver_named_like_another_module_hides_nothing(name: str, tmp_path: Path) -> None:
    before = __import__(name)
    assert load_driver(str(write(tmp_path / f"{name}.py")))().name == "fit"
    assert sys.modules[name] is before


def test_drivers_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path / f / "same.py", FIT.replace("tasks=3", f"tasks={f}")) for f in "123"]
    functions = [load_driver(str(path)) for path in paths]
    assert [function().tasks for function in functions] == [1, 2, 3]
    assert [load_driver(str(path)) for path in paths] == functions
    assert [Path(reference_of(function).location) for function in functions] == paths


def test_another_name_of_a_job_function_is_no_second_one(tmp_path: Path) -> None:
    """The driver had several, it said, and wanted one named."""
    write(tmp_path / "fit_d.py", f"{FIT}\nmain = fit\n")
    assert load_driver("fit_d.py")().name == "fit"
    assert load_driver("fit_d.py:main")().name == "fit"


def test_a_job_function_that_a_driver_imports_is_named_to_be_taken(tmp_path: Path) -> None:
    """It was told to decorate one, which it had."""
    write(tmp_path / "fit_base.py", FIT)
    write(tmp_path / "fit_more.py", "from fit_base import fit\n")
    with pytest.raises(tg.JobError, match=r"no .* of its own, but imports fit: name one, as fit_more\.py:fit$"):
        load_driver("fit_more.py")
    assert load_driver("fit_more.py:fit")().name == "fit"


@pytest.mark.parametrize(
    ("source", "text", "complaint"),
    [
        (FIT, "d.py:other", r"d\.py has no job function 'other'; .* there: fit"),
        ("", "d.py", r"d\.py has no job function: decorate .* is run with `python d\.py`$"),
        ("def fit(): ...\n", "d.py:fit", "no job function 'fit'; .* there: none"),
        (
            FIT + FIT.replace("def fit", "def more"),
            "d.py",
            r"several job functions \(fit, more\): name one, as d\.py:fit",
        ),
        (FIT, "missing.py", r"there is no file /.*/missing\.py"),
        (FIT, "dd.py", r"there is no file /.*/dd\.py \(did you mean d\.py\?\)"),
        (FIT, ".", r"/.* is a directory: name a file in it; there is d\.py"),
        (FIT, "folder", r"/folder is a directory: name a file in it; there is e\.py"),
        (FIT, "folder:fit", r"/folder is a directory: name a file in it; there is e\.py"),
        (FIT, "/dev/fd", r"is a directory: name a file in it; no Python file"),
        (FIT, "missing_module", "no module 'missing_module' to import from here; for a file .* missing_module.py"),
        (FIT, "missing_module.part:fit", r"no module 'missing_module\.part'"),
        (FIT, "d.pyy", r"no module 'd\.pyy' to import from here; did you mean d\.py\?$"),
        (FIT, "d.txt", r"d\.txt is no Python source"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(source: str, text: str, complaint: str, tmp_path: Path) -> None:
    write(tmp_path / "d.py", source)
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "e.py").write_text("")
    with pytest.raises(tg.JobError, match=complaint):
        load_driver(text)


@pytest.mark.parametrize("text", ["broken.py", "broken"])
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "x = 1\ny = 1 / 0\n",
            r"importing .*broken.* failed: ZeroDivisionError: division by zero \(at .*broken\.py, line 3",
        ),
        ("x = 1\ndef broken(:\n", r"failed: SyntaxError: .* \(at .*broken\.py, line 3\)"),
        ("import not_installed_x\n", r"failed: ModuleNotFoundError: .*not_installed_x.* \(at .*broken\.py, line 2\)"),
        ("import numpy as np\nnp.zeros(-1)\n", r"ValueError: negative .* \(at .*broken\.py, line 3\)"),
        ("class A(tg.Task, state='x'): pass\n", r"class A: state takes a list .* \(at .*broken\.py, line 2\)"),
        (
            "tg.run(tg.Job(tasks=1, builder=tg.Task, name='j'), nodes=0)\n",
            r"starts job 'j' while it is imported.* line 2\)",
        ),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--epochs'])\n",
            r"ended with sys\.exit\(2\) .*line 3\): in place of argparse make its arguments parameters of",
        ),
        ("raise SystemExit(3)\n", r"ended with sys\.exit\(3\) .* `if __name__ == '__main__':`"),
    ],
    ids=["error", "syntax", "import", "library", "ours", "run", "argparse", "exit"],
)
def test_an_error_while_importing_a_driver_tells_the_line(
    text: str, source: str, complaint: str, tmp_path: Path
) -> None:
    write(tmp_path / "broken.py", source)
    with pytest.raises(tg.JobError, match=complaint):
        load_driver(text)
    assert "broken" not in sys.modules, "nothing half imported stays"
    write(tmp_path / "broken.py")
    os.utime(tmp_path / "broken.py", (1, 1))  # or its bytecode could be taken for that of the first one
    assert load_driver(text)().tasks == 3


def test_a_driver_that_calls_main_when_imported_takes_no_arguments_of_others_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["process.py", "15"])
    path = write(tmp_path / "eager.py", FIT + "tg.main(fit)\n")
    with pytest.raises(tg.JobError, match=r"eager\.py starts job 'fit' while it is imported"):
        load_driver(str(path))
    assert capsys.readouterr().err == ""


def test_a_driver_that_starts_its_own_job_when_imported_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "eager.py", FIT + "tg.run(fit(), nodes=2)\n")
    with pytest.raises(tg.JobError, match=r"eager\.py starts job 'fit' while it is imported"):
        load_driver(str(path))


START = "if __name__ != '__main__':\n    {}\n"


@pytest.mark.parametrize(
    ("starts", "complaint"),
    [
        ("tg.run(fit(), nodes=2)", "starts job 'fit' while it is imported, and every node imports it"),
        ("import asyncio; asyncio.run(tg.arun(fit(), nodes=2))", "starts job 'fit' while it is imported"),
        ("tg.main(fit)", r"starts job 'fit' while it is imported, and every node imports it: put .* line 7\)"),
        (
            "import asyncio; asyncio.run(None)",  # a coroutine would be one that nobody awaits
            r"asyncio\.run\(\) cannot be called from a running event loop .* line 7\): every node imports it, where an "
            r"event loop runs, so put .* under `if __name__ == '__main__':`",
        ),
    ],
    ids=["run", "arun", "main", "other"],
)
async def test_as_a_node_imports_it_where_a_loop_runs_it_is_told_of_the_guard(
    starts: str, complaint: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "unguarded.py", FIT + START.format(starts))
    with pytest.raises(tg.JobError, match=complaint):
        load_driver(str(path))


# -- references ---------------------------------------------------------------------------------------


def test_what_a_script_defined_is_found_at_the_prompt_after_it(tmp_path: Path) -> None:
    """`python -i fit.py`: Python takes `__file__` away once the script is through."""
    script = write(tmp_path / "fit_i.py", FIT + "from taskgraph.driver.spec import JobSpec\n")
    typed = "print(JobSpec.of(fit(tasks=5)).to_bytes().decode())\n@tg.job\ndef other(): ...\n\nJobSpec.of(other())\n"
    typed = typed.replace("def other(): ...", "def other(): return fit()")
    done = subprocess.run(
        [sys.executable, "-i", script.name], input=typed, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    spec = JobSpec.from_bytes(done.stdout.strip().encode())
    assert spec.driver == DriverRef("file", str(script), "fit") and spec.load_job().tasks == 5
    assert "other was defined interactively" in done.stderr


TELL = """
import dataclasses, json, sys
from taskgraph.driver.spec import JobSpec
if __name__ == "__main__":
    print(JobSpec.of(fit(tasks=5)).to_bytes().decode())
"""


PROFILED = ("-m", "cProfile", "-o", "profile")
"""It runs what is named next as `__main__`, and so is called itself."""


@pytest.mark.parametrize("by", [(), PROFILED], ids=["python", "profiler"])
def test_a_script_is_found_again_by_its_file(by: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "scripts" / "script_a.py", FIT + TELL)
    spec = JobSpec.from_bytes(python(*by, str(path), cwd=tmp_path).encode())
    assert spec.driver == DriverRef("file", str(path), "fit")
    assert spec.load_job().tasks == 5, "with the same fingerprint as __main__ had"


@pytest.mark.parametrize("by", [(), PROFILED], ids=["python", "profiler"])
def test_a_script_run_as_a_module_is_found_again_by_its_name_and_place(by: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path / "code" / "proj_b" / "__init__.py", "")
    write(tmp_path / "code" / "proj_b" / "sizes.py", "TASKS = 3\n")
    write(tmp_path / "code" / "proj_b" / "fit.py", "from . import sizes\n" + FIT + TELL)
    spec = JobSpec.from_bytes(python(*by, "-m", "proj_b.fit", cwd=tmp_path / "code").encode())
    assert spec.driver == DriverRef("module", "proj_b.fit", "fit", root=str(tmp_path / "code"))
    assert spec.load_job().tasks == 5, "also by a process that runs elsewhere"


@pytest.mark.parametrize("how", ["-c", "-"])
def test_a_job_function_typed_in_cannot_be_found_by_others(how: str, tmp_path: Path) -> None:
    text = HEAD + FIT + TELL
    arguments = [how, text] if how == "-c" else [how]
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert "fit was defined interactively" in done.stderr
    assert "put it into a file, or run it in this process with nodes=0" in done.stderr


def test_a_job_function_in_a_zip_archive_cannot_be_found_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be defined interactively."""
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("zipped_fit.py", HEAD + FIT)
    monkeypatch.syspath_prepend(str(tmp_path / "z.zip"))
    with pytest.raises(tg.JobError) as refused:
        reference_of(load_driver("zipped_fit"))
    file = tmp_path / "z.zip" / "zipped_fit.py"
    assert f"fit is in {file}, which is no plain file, so other processes cannot import it" in str(refused.value)


def test_a_script_whose_name_no_import_takes_is_refused_before_nodes_are_started(tmp_path: Path) -> None:
    """Python runs it; every node failed."""
    path = write(tmp_path / "fit-script", FIT + TELL)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert f"{path} is no Python source: a driver is a file whose name ends in .py, or a module" in done.stderr


def test_a_job_function_under_another_name_is_found_by_that(tmp_path: Path) -> None:
    write(tmp_path / "named.py", FIT + "mine = fit\ndel fit\n")
    assert reference_of(load_driver("named.py:mine")).function == "mine"


def test_a_job_function_that_its_module_lost_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "lost.py", FIT + "mine = fit\n")
    function = load_driver("lost.py:fit")
    for name in ("fit", "mine"):
        delattr(sys.modules["lost"], name)
    with pytest.raises(tg.JobError, match=r"lost\.py has no fit"):
        reference_of(function)


def test_on_another_host_the_file_may_be_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = write(tmp_path / "there" / "moved.py"), tmp_path / "here"
    spec = JobSpec.of(load_driver(str(there))())
    here.mkdir()
    monkeypatch.chdir(here)
    del sys.modules["moved"]
    there.rename(here / "moved.py")
    assert spec.load_job().tasks == 3
    (here / "moved.py").unlink()
    with pytest.raises(tg.JobError, match=r"no file .*/there/moved\.py on this host, and no moved\.py in .*/here"):
        spec.load_job()


# -- fingerprints -------------------------------------------------------------------------------------


def print_of(path: Path) -> str:
    imports = (
        "import sys; from taskgraph.driver.loading import load_driver; from taskgraph.driver.sources import fingerprint"
    )
    code = f"{imports}; print(fingerprint(load_driver(sys.argv[1])))"
    return python("-c", code, str(path), cwd=path.parent)


def test_the_same_driver_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "kit_d" / "part.py", "X = 1\n")
        write(tmp_path / folder / "fit_d.py", "import kit_d.part\n" + FIT)
    one, two = (print_of(tmp_path / folder / "fit_d.py") for folder in ("one", "two"))
    assert one == two
    assert len(one) == 16 and int(one, 16) >= 0


def test_what_is_imported_later_or_inside_functions_counts_too(tmp_path: Path) -> None:
    path = write(tmp_path / "lazy.py", FIT + "def setup():\n    from kit_e import part\n")
    part = write(tmp_path / "kit_e" / "part.py", "X = 1\n")
    before = fingerprint(load_driver(str(path)))
    part.write_text("X = 2\n")
    assert fingerprint(load_driver(str(path))) != before


# -- specs --------------------------------------------------------------------------------------------


def spec_of(tmp_path: Path, **changes: Any) -> JobSpec:
    job = load_driver(str(write(tmp_path / "fit_s.py")))(tasks=5)
    return JobSpec.of(dataclasses.replace(job, **changes), expected_nodes=4)


def test_a_spec_survives_json(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert JobSpec.from_bytes(spec.to_bytes()) == spec
    assert (spec.name, spec.kwargs, spec.tasks, spec.epochs, spec.expected_nodes) == ("fit", {"tasks": 5}, 5, 4, 4)
    assert len(spec.run) == 32
    assert spec.run != spec_of(tmp_path).run


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"name": "x"}'])
def test_what_is_no_spec_is_refused(data: bytes) -> None:
    with pytest.raises(tg.DecodeError, match="not a job's spec"):
        JobSpec.from_bytes(data)


def test_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    more = spec.to_bytes()[:-1] + b',"later":1}'
    assert JobSpec.from_bytes(more) == spec


def test_a_setting_that_the_version_which_submitted_a_job_had_not_is_what_it_is_by_itself(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, settings=tg.Settings(drain_s=7))
    former = dataclasses.replace(spec, settings={"drain_s": 7})
    for each in (spec, former):
        assert (each.setting("drain_s"), each.setting("lease_ttl_s")) == (7, tg.Settings().lease_ttl_s)


def test_nodes_make_the_job_that_was_submitted(tmp_path: Path) -> None:
    settings = tg.Settings(lease_ttl_s=3.0, blas_threads=2)
    changes: dict[str, Any] = {"name": "other", "epochs": 9, "backups": 2, "min_nodes": 3, "seed": 5}
    made = JobSpec.from_bytes(spec_of(tmp_path, **changes, settings=settings).to_bytes()).load_job()
    assert {name: getattr(made, name) for name in changes} == changes
    assert (made.tasks, made.settings) == (5, settings)


def test_a_job_function_that_makes_another_job_here_is_an_error(tmp_path: Path) -> None:
    spec = dataclasses.replace(spec_of(tmp_path), tasks=7)
    with pytest.raises(tg.JobError, match="submitted with 7 tasks, but here fit makes 5: it must make the same job"):
        spec.load_job()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            "rows = {}['XX']",
            r"^fit\(\.\.\.\) of fit_r\.py failed: KeyError: 'XX' \(at .*fit_r\.py, line 5\)$",
        ),
        ("return tg.Job(task=2, builder=tg.Task)", r"^Job\(task=.* mean 'tasks'\? \(at .*fit_r\.py, line 5\)$"),
        ("tg.Settings(lease_ttl='5')", r"did you mean 'lease_ttl_s'\? \(at .*fit_r\.py, line 5\)$"),
        ("return tg.Job(tasks=2)", r"of fit_r\.py failed: TypeError: .* 'builder' \(at .*fit_r\.py, line 5\)$"),
        ("return 5", r"^fit must return a tg\.Job, not int$"),
        (
            "raise SystemExit(0)",
            r"^fit\(\.\.\.\) of fit_r\.py ended with sys\.exit\(0\) \(at .*fit_r\.py, line 5\): .* or raise an error$",
        ),
    ],
    ids=["error", "job", "settings", "missing", "none", "exit"],
)
def test_an_error_of_a_job_function_tells_the_line(body: str, complaint: str, tmp_path: Path) -> None:
    text = f"\n@tg.job\ndef fit():\n    {body}\n"
    function = load_driver(str(write(tmp_path / "fit_r.py", text)))
    with pytest.raises(tg.JobError, match=complaint):
        make_job(function, {})
    spec = dataclasses.replace(
        spec_of(tmp_path), driver=reference_of(function), fingerprint=fingerprint(function), kwargs={}
    )
    with pytest.raises(tg.JobError, match=complaint):
        spec.load_job()


def test_another_version_of_the_driver_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    write(tmp_path / "fit_s.py", FIT + "# another version\n")
    with pytest.raises(tg.FingerprintMismatch) as refused:
        spec.load_job()
    text = str(refused.value)
    assert spec.fingerprint in text and fingerprint(load_driver("fit_s.py")) in text
    assert "submit the job again" in text


def test_a_job_of_another_protocol_is_refused_and_both_are_named(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    raw = json.loads(spec.to_bytes())
    old = JobSpec.from_bytes(json.dumps({**raw, "protocol": 1}).encode())
    assert (spec.protocol, old.protocol) == (PROTOCOL, 1)
    for call in (old.load_job, old.check_protocol):
        with pytest.raises(tg.FingerprintMismatch, match=f"speak protocol 1; taskgraph .* here speaks {PROTOCOL}"):
            call()
    spec.check_protocol()


def test_a_job_of_one_process_needs_no_driver() -> None:
    spec = JobSpec.local(tg.Job(tasks=2, builder=tg.Task))
    assert (spec.name, spec.driver) == ("job", None)
    assert JobSpec.from_bytes(spec.to_bytes()) == spec
    with pytest.raises(tg.JobError, match="lives in the process that made it"):
        spec.load_job()
