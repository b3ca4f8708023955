"""Tests of a group run on one worker of pytest-xdist: for a fixture that they share, or a clock that they read."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("grouped")
def test_the_workers_know_the_group_of_a_test(request):
    """By the end of its name. pytest 9.2 ignores the name that pytest-xdist 3.8 gives, which then spreads each group."""
    is_grouped = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@grouped") or not is_grouped, "this pytest does not go with pytest-xdist"
