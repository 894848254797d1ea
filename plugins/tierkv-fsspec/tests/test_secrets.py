"""Credentials come from the usual chains and go nowhere else: all output is searched for a planted secret."""

from __future__ import annotations

import base64
import dataclasses
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec_support import S3Server, check, get, key, object_name, open_at, put

import tierkv
from tierkv.config import parse_config
from tierkv_fsspec import FsspecOptions

KEY_ID, SECRET, TOKEN = "AKIAPLANTEDSECRET001", "planted/secret+with=signs", "planted-session-token"
PLANTED = (KEY_ID, SECRET, TOKEN, "planted")


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unique credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"planted key of an account").decode())


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that this plugin and the framework log."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in ("tierkv", "tierkv_fsspec")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield text
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def require_clean(*outputs: object) -> None:
    """No output contains a secret, in its text or its repr."""
    for output in outputs:
        for text in (str(output), repr(output)):
            assert not [secret for secret in PLANTED if secret in text], text


def test_no_failure_shows_a_secret(s3: S3Server, url: str, options: dict[str, Any], log: io.StringIO) -> None:
    """Open, use, refuse, fail, check: no error, check result, repr or log line holds a credential."""
    backend = open_at(url, **options)
    require_clean(
        backend,
        backend._store,
        *vars(backend).values(),
        *vars(backend._store).values(),
        *vars(backend._store.present).values(),
    )
    put(backend, {key(1): b"x"})
    outputs: list[object] = []
    for status in ("403 Forbidden", "500 Internal Server Error", "400 Bad Request", "301 Moved Permanently"):
        s3.refuse[object_name(key(1))] = status
        outputs += [*get(backend, key(1)), *put(backend, {key(1): b"y"}), *backend.delete([key(1)])]
        outputs += backend.contains([key(1)])
    s3.refuse.clear()
    failures = [output for output in outputs if isinstance(output, Exception)]
    assert len(failures) >= 12  # obstore deletes by another request
    with s3.enforcing_rights():
        with pytest.raises(tierkv.errors.BackendError) as failure:
            open_at(url, **options)
        outputs.append(failure.value)
        outputs += check(url, **options).values()
    assert failure.value.__cause__ is None
    assert failure.value.__suppress_context__
    outputs += check(url, **options).values()
    require_clean(*outputs, log.getvalue())
    backend.close()


def test_bad_endpoints_and_hosts(url: str, options: dict[str, Any]) -> None:
    """If there is no server, libraries quote the whole request with its signature."""
    for endpoint in ("http://127.0.0.1:9", "http://no-such-host.invalid:1"):
        with pytest.raises(tierkv.errors.BackendError) as failure:
            open_at(url, **(options | {"endpoint_url": endpoint, "connect_timeout_s": 0.5, "read_timeout_s": 0.5}))
        require_clean(failure.value)


def test_descriptions_hold_none(url: str) -> None:
    """Users dump configurations to find a mistake: options never hold credentials of the chain."""
    options = FsspecOptions(url=url)
    require_clean(options, dataclasses.asdict(options))
    config = parse_config({"host": {"capacity": "1MiB"}, "tiers": [{"backend": "fsspec", "url": url}]})
    require_clean(config, config.model_dump_json())


def test_absent_azure_server(log: io.StringIO) -> None:
    """Azure's library has its own messages for failures."""
    options = {"endpoint_url": "http://127.0.0.1:9/account", "connect_timeout_s": 0.5, "read_timeout_s": 0.5}
    with pytest.raises(tierkv.errors.BackendError) as failure:
        open_at("az://container/x", **options)
    account_key = base64.b64encode(b"planted key of an account").decode()
    assert account_key not in str(failure.value) + log.getvalue()
    require_clean(failure.value, *check("az://container/x", **options).values())
