"""A real S3 server on the loopback interface, and an environment that reaches nothing else."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not see siblings

from fsspec_support import ObjectServer, S3Server

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATIERKVTESTS00001",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_PROXY": "127.0.0.1",
}


SERVER_URL, SERVER_ENDPOINT = "TIERKV_TEST_OBJECT_URL", "TIERKV_TEST_OBJECT_ENDPOINT"
"""Environment variable with a bucket or container of another server for test_servers.py; credentials as usual."""


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Credentials of no real user; no profile, no proxy, no instance metadata. Child processes inherit them."""
    if SERVER_URL in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def _no_late_listing() -> Iterator[None]:
    """One server serves all tests: requests of a closed tier's listing must not count in the next test."""
    yield
    patience_s = time.monotonic() + 10.0
    while any(thread.name.endswith("-warm-up") for thread in threading.enumerate()) and time.monotonic() < patience_s:
        time.sleep(0.01)


@pytest.fixture(scope="session")
def s3(environment: None) -> Iterator[S3Server]:
    """One server for all tests; each test makes its own bucket or prefix."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> ObjectServer:
    """Server named by the environment, or the one for all tests."""
    if SERVER_URL in os.environ:
        return ObjectServer(os.environ[SERVER_URL].rstrip("/"), os.environ.get(SERVER_ENDPOINT))
    s3: S3Server = request.getfixturevalue("s3")
    return ObjectServer(f"s3://{s3.new_bucket()}", s3.endpoint)


@pytest.fixture(params=["obstore", "fsspec"])
def options(request: pytest.FixtureRequest, s3: S3Server) -> dict[str, Any]:
    """Options of a tier on the server, once for each implementation."""
    return {
        "endpoint_url": s3.endpoint,
        "implementation": request.param,
        "connect_timeout_s": 2.0,
        "read_timeout_s": 10.0,
    }


@pytest.fixture
def url(s3: S3Server) -> str:
    """A prefix in a separate bucket."""
    return f"s3://{s3.new_bucket()}/pre/fix"
