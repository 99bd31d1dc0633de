"""What a process takes of its machine, also where there is nothing left to find out with."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import NoReturn

import pytest

from taskgraph.observe.usage import Usage


async def test_usage_without_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has none left is asked for its status all the more."""
    before = Usage.now()

    def none_left(*arguments: object, **options: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", none_left)
    monkeypatch.setattr(Path, "read_text", none_left)
    found = Usage.now()
    assert found.memory_bytes > 0 and before.memory_bytes > 0
    assert found.threads > 0 and found.coroutines == before.coroutines > 0
    assert before.files < found.files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
