"""Makes the environment of the peers, and installs what can be installed.

    python benchmarks/install.py .venv-bench

Every line of requirements.txt is installed on its own. One that was tried is tried again only when the line changed or
it had failed; a failure is named, and is none of ours: the bench skips what is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
_TIMEOUT_S = 1800.0


def lines() -> list[tuple[str, float]]:
    """(requirement, GiB of free disk that it wants)."""
    found = []
    for line in REQUIREMENTS.read_text("utf-8").splitlines():
        requirement, _, comment = line.partition("#")
        if requirement.strip():
            wanted = re.search(r"GiB (\d+)", comment)
            found.append((requirement.strip(), float(wanted[1]) if wanted else 0.0))
    return found


def cpu_build(python: Path, requirement: str) -> str:
    """The requirement, or its newest version built for processors alone, where pip finds one: a tenth of the size."""
    name, _, bounds = requirement.partition(">=")
    least, _, below = bounds.partition(",<")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "index", "versions", name]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=_TIMEOUT_S)
    versions = re.findall(r"[\d.]+\+cpu", done.stdout) if done.returncode == 0 else []
    fitting = [version for version in versions if numbers(least) <= numbers(version) < numbers(below)]
    return f"{name}=={max(fitting, key=numbers)}" if fitting else requirement


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def install(python: Path, requirement: str, gib: float) -> str:
    """Why it is not installed, or nothing."""
    if gib:
        requirement = cpu_build(python, requirement)
        gib = gib if "+cpu" not in requirement else 2.0
    free = shutil.disk_usage(python.parent).free / 2**30
    if free < gib:
        return f"wants {gib:g} GiB of free disk, there are {free:.0f}"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    try:
        done = subprocess.run([*pip, requirement], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"pip did not end within {_TIMEOUT_S:g} s"
    said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["no reason"]
    return "" if done.returncode == 0 else said[-1].strip()


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    stamp = folder / "installed.json"
    if not python.exists() or subprocess.run([str(python), "-c", "import pip"], capture_output=True).returncode:
        print(f"Making {folder} for the peers (once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    installed: list[str] = json.loads(stamp.read_text()) if stamp.exists() else []
    for requirement, gib in lines():
        if requirement in installed:
            continue
        print(f"Installing {requirement} into {folder}", flush=True)
        why = install(python, requirement, gib)
        if why:
            print(f"  not installed: {why}", flush=True)
        else:
            installed.append(requirement)
            stamp.write_text(json.dumps(installed))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="of the environment")
    main(options.parse_args().folder)
