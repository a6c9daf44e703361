"""A tiny model and its server, of all tests of a file; after each of them nothing of a request may be left."""

from __future__ import annotations

import pytest

from serve_tools import is_idle, running, tiny_service, until


@pytest.fixture(scope="module")
def service():
    return tiny_service()


@pytest.fixture(scope="module")
def client(service):
    with running(service) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    service = request.getfixturevalue("service") if "service" in request.fixturenames else None
    yield
    if service is not None:
        until(lambda: is_idle(service))
