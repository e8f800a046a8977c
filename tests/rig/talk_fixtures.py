"""Fixtures for tests that talk to the MCP server: `world` is a cloud with nothing in it. Use with `pytest_plugins = ["tests.rig.talk_fixtures"]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.rig.fake_tpu import services
from tests.rig.talk import cloud

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig.talk import World


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The servers and the door behind `world`, started once."""
    with cloud(tmp_path_factory.mktemp("mcp")) as made:
        yield made


@pytest.fixture
def world(shared_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Nothing is there, nothing is remembered, and settings are as they come."""
    for key, value in services(shared_world.door).items():
        monkeypatch.setenv(key, value)
    shared_world.reset()
    return shared_world
