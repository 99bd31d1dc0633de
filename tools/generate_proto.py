#!/usr/bin/env python3
"""Generates the protobuf modules from proto/**.

    python tools/generate_proto.py            # writes *_pb2.py and *_pb2.pyi next to the code that uses them
    python tools/generate_proto.py --check    # writes nothing; fails if a committed file differs

The generated files are committed, so that an installation needs no compiler. They are made by a compiler that is
older than the runtimes we allow, on purpose: from 5.27 on, generated code checks the runtime's major version
when it is imported and refuses one that is two majors newer. What 1.64 makes has no such check and uses only
what protobuf 5, 6 and 7 all offer. That compiler is installed into a throwaway environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
COMPILER = ("grpcio-tools==1.64.3", "setuptools<81")  # the compiler imports pkg_resources, which setuptools 81 dropped

#: Folder below proto/, or one .proto file in it (without the suffix) -> package its modules go to. A folder that is
#: not here maps onto itself.
DESTINATIONS = {
    "taskgraph/etcd": "taskgraph/coordination/etcd",
    "taskgraph/v1/control": "taskgraph/observe/_proto",
}


def compiler(folder: Path) -> Path:
    """The interpreter of a fresh environment in `folder` that has the compiler."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *COMPILER], check=True)
    return python


def generate(python: Path, out: Path) -> dict[Path, bytes]:
    """What every .proto file below proto/ becomes: path below the repository -> content."""
    protos = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
    outputs = [f"-I{PROTO}", f"--python_out={out}", f"--pyi_out={out}"]
    subprocess.run([python, "-W", "ignore", "-m", "grpc_tools.protoc", *outputs, *protos], check=True)
    made = {}
    for path in sorted(out.rglob("*_pb2.py*")):
        below = path.relative_to(out)
        parent = below.parent.as_posix()
        file = f"{parent}/{below.name.partition('_pb2')[0]}"
        folder = DESTINATIONS.get(file, DESTINATIONS.get(parent, parent))
        # The stubs name generic types without their arguments, which strict checking would report.
        head = b"# mypy: ignore-errors\n" if path.suffix == ".pyi" else b""
        made[Path(folder) / below.name] = head + path.read_bytes()
    return made


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the protobuf modules from proto/**.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a committed file differs")
    parser.add_argument("--python", type=Path, help="an interpreter that has the compiler already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        made = generate(options.python or compiler(Path(scratch) / "env"), out)
    stale = [path for path, new in made.items() if _content(ROOT / path) != new]
    for path in stale:
        print(("stale: " if options.check else "wrote: ") + str(path))
        if not options.check:
            (ROOT / path).write_bytes(made[path])
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
