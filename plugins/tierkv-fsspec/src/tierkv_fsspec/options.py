"""Options of an fsspec tier, as written in its table, and the parsing of its URL."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import fsspec  # type: ignore[import-untyped]  # it ships no types

EXAMPLES = '"s3://bucket/prefix", "gs://bucket/prefix", "file:///mnt/shared/tierkv"'
ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "local": "file"}
LOGIN_SCHEMES = ("sftp", "ssh", "hdfs", "webhdfs", "smb")
"""Schemes whose URLs may name a user: user@host."""
BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
READ_ONLY_PROTOCOLS = ("http", "https")
ENDPOINT_PROTOCOLS = ("s3", "gs", "az")
REGION_PROTOCOLS = ("s3",)
CLASS_PROTOCOLS = ("s3", "gs", "az")
TAG_PROTOCOLS = ("s3", "az")
WARM_UP_KEYS_MAX = 10_000_000
CONTROL_CHARACTERS = 32
REQUESTS_MAX = 256

_ONLY_FOR = {
    "endpoint_url": ENDPOINT_PROTOCOLS,
    "region": REGION_PROTOCOLS,
    "storage_class": CLASS_PROTOCOLS,
    "tags": TAG_PROTOCOLS,
}
_SECRET_WORDS = ("secret", "token", "password", "passwd", "credential", "connection_string")
_SECRET_ENDS = ("key", "access_key_id")


@dataclass(frozen=True, slots=True)
class Location:
    """Target of a URL."""

    protocol: str
    """Name of the protocol in fsspec; aliases known to this plugin are resolved."""
    bucket: str
    """Bucket or container; empty for ``file``."""
    prefix: str
    """Path within the bucket, without slashes at the ends; for ``file`` an absolute path."""
    url: str
    """URL as shown in messages and passed to fsspec."""

    @classmethod
    def parse(cls, url: str) -> Location:
        """Parse a URL, or an absolute path.

        Raises:
            ValueError: names the mistake and gives an example.
        """
        if any(ord(character) < CONTROL_CHARACTERS for character in url):
            raise ValueError(f"url = {url!r}: control characters are not allowed")
        if "::" in url:
            raise ValueError(f"url = {url!r}: chained URLs are not supported; tierkv stacks tiers itself")
        scheme, found, rest = url.partition("://")
        if not found and not url.startswith("/"):
            raise ValueError(f"url = {url!r}: give a URL like {EXAMPLES}, or an absolute path")
        if not found or ALIASES.get(scheme, scheme) == "file":
            return cls._of_path(url, rest if found else url)
        return cls._of_bucket(url, scheme, rest)

    @classmethod
    def _of_path(cls, url: str, path: str) -> Location:
        if not path.startswith("/") or not path.strip("/"):
            raise ValueError(f'url = {url!r}: give an absolute path, like "file:///mnt/shared/tierkv"')
        return cls("file", "", path.rstrip("/"), f"file://{path.rstrip('/')}")

    @classmethod
    def _of_bucket(cls, url: str, scheme: str, rest: str) -> Location:
        if scheme not in _schemes():
            raise ValueError(f"url = {url!r}: unknown scheme {scheme!r}{_nearest(scheme)}; give a URL like {EXAMPLES}")
        bucket, _, prefix = rest.strip("/").partition("/")
        if not bucket or (scheme in BUCKET_SCHEMES and rest.startswith("/")):
            raise ValueError(f"url = {url!r}: names no bucket; give a URL like {EXAMPLES}")
        if any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
            raise ValueError(f"url = {url!r}: the prefix may not hold empty parts, '.' or '..'")
        user, at, _ = bucket.rpartition("@")
        if at and (":" in user or scheme not in LOGIN_SCHEMES):
            raise ValueError(f"url: no credentials in URLs, they end up in logs; {CHAINS}")
        if scheme in READ_ONLY_PROTOCOLS and ("?" in rest or "#" in rest):
            raise ValueError("url: no query and no fragment in http URLs; names are appended to the URL")
        return cls(ALIASES.get(scheme, scheme), bucket, prefix.strip("/"), f"{scheme}://{rest.strip('/')}")

    def child(self, name: str) -> Location:
        """Location one level further down."""
        prefix = f"{self.prefix}/{name}" if self.prefix else name
        return Location(self.protocol, self.bucket, prefix, f"{self.url}/{name}")


CHAINS = (
    "credentials come from the usual chain: for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, "
    "~/.aws, or the role of the machine; for Google GOOGLE_APPLICATION_CREDENTIALS; for Azure AZURE_STORAGE_*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecOptions:
    """Options of the backend ``fsspec``."""

    url: str
    """Bucket and prefix, or directory. Other objects below it are left alone."""
    endpoint_url: str | None = None
    """URL of an S3-compatible server, like "http://10.0.0.7:9000"; also of one compatible with Google or Azure."""
    region: str | None = None
    """Region of the bucket (S3)."""
    connect_timeout_s: float = 5.0
    """Seconds to establish a connection (S3, Google, Azure, HTTP)."""
    read_timeout_s: float = 10.0
    """Seconds for one request (S3, Google, Azure, HTTP). More than the tier's deadlines only keeps a thread."""
    concurrent_requests: int = 16
    """Requests in flight at once, over all calls."""
    implementation: Literal["auto", "obstore", "fsspec"] = "auto"
    """Library to use: "obstore" (fastest; S3, Google, Azure), "fsspec" (any protocol), or "auto".

    "auto" uses obstore if it is installed and serves the URL.
    """
    warm_up_keys_max: int = 100_000
    """Objects listed in the background at open. The first lookup of each needs no request. 0: no listing."""
    warm_up_s: float = 30.0
    """Seconds after which that listing ends, complete or not."""
    storage_class: str | None = None
    """Storage class of new objects, in the store's terms, like "STANDARD_IA" (S3, Google, Azure)."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of new objects, for lifecycle rules that select by tag (S3, Azure)."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the protocol's fsspec file system. Credentials are refused."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, the allowed values and the fix.
        """
        protocol = Location.parse(self.url).protocol
        for name, protocols in _ONLY_FOR.items():
            if getattr(self, name) and protocol not in protocols:
                served = ", ".join(protocols)
                raise ValueError(f"{name}: only for {served} URLs; use storage_options for {protocol}, or leave it out")
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        for name in ("connect_timeout_s", "read_timeout_s", "warm_up_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} = {seconds}: give seconds above 0")
        if not 1 <= self.concurrent_requests <= REQUESTS_MAX:
            raise ValueError(f"concurrent_requests = {self.concurrent_requests}: give 1 to {REQUESTS_MAX}")
        if not 0 <= self.warm_up_keys_max <= WARM_UP_KEYS_MAX:
            raise ValueError(f"warm_up_keys_max = {self.warm_up_keys_max}: give 0 to {WARM_UP_KEYS_MAX}")
        if self.implementation not in ("auto", "obstore", "fsspec"):
            raise ValueError(f'implementation = {self.implementation!r}: allowed are "auto", "obstore" and "fsspec"')
        for key in _secret_keys(self.storage_options):
            raise ValueError(f"storage_options.{key}: no credentials in the configuration; {CHAINS}")

    @property
    def location(self) -> Location:
        """Parsed URL."""
        return Location.parse(self.url)


def _schemes() -> set[str]:
    return {*fsspec.available_protocols(), *fsspec.registry}


def _check_endpoint(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f'endpoint_url = {url!r}: give http:// or https:// and a host, like "http://10.0.0.7:9000"')
    if parts.username or parts.password or parts.query:
        raise ValueError(f"endpoint_url: no credentials and no query in it; {CHAINS}")


def _secret_keys(options: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in options.items():
        name = str(key).lower().replace("-", "_")
        if any(word in name for word in _SECRET_WORDS) or name.endswith(_SECRET_ENDS):
            yield f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _secret_keys(value, f"{path}{key}.")


def _nearest(scheme: str) -> str:
    close = difflib.get_close_matches(scheme, sorted(_schemes()), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
