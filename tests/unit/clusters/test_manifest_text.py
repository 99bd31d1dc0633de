"""YAML that we write is read back as what it was, by PyYAML."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.clusters.kubernetes.manifest_text import yaml_text

yaml = pytest.importorskip("yaml")

# What Kubernetes' objects are of: no floats, and texts that JSON can have.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffe\uffff"), max_size=30)
WORDS = st.sampled_from(["yes", "No", "null", "~", "1e3", "0x1f", "1:30", "a: b", "# a", "- a", "--a", "2024-01-01"])
SCALARS = st.one_of(TEXTS, WORDS, st.booleans(), st.integers(-(2**40), 2**40), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.one_of(TEXTS, WORDS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_written_is_read_back(made: dict[str, Any]) -> None:
    made = {"kind": "Some", **made}
    assert yaml.safe_load(yaml_text([made], {})) == made


@pytest.mark.parametrize("empty", [{}, []])
def test_empty_entries_under_a_comment_stay_what_they_are(empty: Any) -> None:
    made = {"kind": "Job", "spec": {"policy": empty}}
    assert yaml.safe_load(yaml_text([made], {"Job.spec.policy.rules": "In this order."})) == made


def test_comments_stand_before_their_entries() -> None:
    made = {"kind": "Job", "spec": {"backoffLimit": 3, "rules": [{"action": "Ignore"}, {"action": "Fail"}]}}
    text = yaml_text([made], {"Job.spec.backoffLimit": "It is tried again.", "Job.spec.rules": "In this order."})
    assert text.splitlines() == [
        "kind: Job",
        "spec:",
        "  # It is tried again.",
        "  backoffLimit: 3",
        "  # In this order.",
        "  rules: [{action: Ignore}, {action: Fail}]",
    ]
