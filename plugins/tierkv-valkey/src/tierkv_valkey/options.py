"""Options of a Valkey tier, as written in its table, and the parsing of its URL."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Literal

EXAMPLES = '"valkey://10.0.0.7:6379" or, with TLS, "valkeys://cache.example.com:6380"'
CLEAR_SCHEMES = ("valkey", "redis")
TLS_SCHEMES = ("valkeys", "rediss")
PORT, SENTINEL_PORT = 6379, 26379
PORT_MAX = 65535
PREFIX_CHARS_MAX = 64
TTL_S_MAX = 10 * 366 * 86400.0
DATABASES_MAX = 1 << 16
CREDENTIALS = (
    "set the password in the environment variable that password_env names, or in the file password_file, and the user "
    "in username"
)

_HOST = re.compile(r"(?P<v6>\[[0-9A-Fa-f:.%]+\])|(?P<name>[A-Za-z0-9_.-]+)")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        """Text for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Location:
    """Target of a URL."""

    addresses: tuple[Address, ...]
    """Servers: the one, the sentinels, or some nodes of the cluster."""
    database: int
    """Number of the database."""
    tls: bool
    """Whether connections are encrypted."""

    @classmethod
    def parse(cls, url: str, default_port: int = PORT) -> Location:
        """Parse a URL with one or more hosts.

        Raises:
            ValueError: names the mistake and gives an example. It repeats no part that may be a password.
        """
        scheme, found, rest = url.partition("://")
        if "@" in url:
            raise ValueError(f"url: no user and no password in URLs, they end up in logs; {CREDENTIALS}")
        if not found or scheme not in (*CLEAR_SCHEMES, *TLS_SCHEMES):
            raise ValueError(f"url = {url!r}: give a URL like {EXAMPLES}")
        if "?" in rest or "#" in rest:
            raise ValueError(f"url = {url!r}: no query and no fragment; write options as keys of the tier's table")
        hosts, _, path = rest.partition("/")
        if path and not (path.isdecimal() and int(path) < DATABASES_MAX):
            raise ValueError(f"url = {url!r}: behind the host only a database number may follow, as in .../0")
        addresses = tuple(_address(part.strip(), url, default_port) for part in hosts.split(","))
        return cls(addresses, int(path or 0), scheme in TLS_SCHEMES)


def _address(text: str, url: str, default_port: int) -> Address:
    found = _HOST.match(text)
    if found is None:
        raise ValueError(f"url = {url!r}: a host is missing or misspelled; give a URL like {EXAMPLES}")
    rest = text[found.end() :]
    if not rest:
        return Address(found[0].strip("[]"), default_port)
    port = rest.removeprefix(":")
    if port == rest or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
        raise ValueError(f"url = {url!r}: {rest!r} is no port; give a number from 1 to {PORT_MAX}, like :{PORT}")
    return Address(found[0].strip("[]"), int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions:
    """Options of the backend ``valkey``."""

    url: str
    """Server, like "valkey://10.0.0.7:6379/0"; "valkeys://" with TLS. "redis://" and "rediss://" mean the same. With
    Sentinel the sentinels, with Cluster some of the nodes, separated by commas."""
    mode: Literal["single", "sentinel", "cluster"] = "single"
    """Kind of deployment: "single", "sentinel" or "cluster"."""
    service: str | None = None
    """Name of the primary in Sentinel's configuration, often "mymaster"."""
    prefix: str = "tierkv"
    """First part of all keys on the server. Keys with another prefix are left alone."""
    ttl_s: float | None = None
    """Seconds after which the server removes a chunk, counted from its store. None: the server's eviction decides."""
    username: str | None = None
    """User of an access control list."""
    password_env: str = "TIERKV_VALKEY_PASSWORD"  # noqa: S105  the name of a variable
    """Environment variable with the password. Without it, connections do not authenticate."""
    password_file: str | None = None
    """File with the password, in place of the variable. Each new connection reads it, so that the password may be
    replaced while engines run."""
    sentinel_password_env: str = "TIERKV_VALKEY_SENTINEL_PASSWORD"  # noqa: S105  the name of a variable
    """Environment variable with the password of the sentinels."""
    ca_file: str | None = None
    """File with the certificates that sign the server's, for TLS. None: those of the system."""
    cert_file: str | None = None
    """File with the client's certificate, for TLS."""
    key_file: str | None = None
    """File with the client's private key, for TLS."""
    check_hostname: bool = True
    """Whether the server's certificate must name the host of the URL. A cluster's nodes often announce bare numbers."""
    connect_timeout_s: float = 0.5
    """Seconds for a connection. Keep the sum of both timeouts below the tier's probe_deadline_s."""
    timeout_s: float = 1.0
    """Seconds without a byte from the server, or to it, after which a call fails. The client never tries again by
    itself."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, the allowed values and the fix.
        """
        if self.mode not in ("single", "sentinel", "cluster"):
            raise ValueError(f'mode = {self.mode!r}: allowed are "single", "sentinel" and "cluster"')
        location = self.location
        if self.mode == "single" and len(location.addresses) > 1:
            raise ValueError(f'url = {self.url!r}: several hosts need mode = "cluster" or mode = "sentinel"')
        if self.mode == "cluster" and location.database:
            raise ValueError(
                f"url = {self.url!r}: a cluster is used with database 0 alone; leave /{location.database} out"
            )
        if (self.mode == "sentinel") != bool(self.service):
            raise ValueError(
                f'service = {self.service!r}: give the name of the primary with mode = "sentinel", and only then'
            )
        if not _PREFIX.fullmatch(self.prefix) or len(self.prefix) > PREFIX_CHARS_MAX:
            raise ValueError(
                f"prefix = {self.prefix!r}: give 1 to {PREFIX_CHARS_MAX} letters, digits, '.', ':', '_' and '-'; "
                "braces would put all chunks in one slot"
            )
        if self.password_file is not None and not os.path.isfile(self.password_file):  # noqa: PTH113  text
            raise ValueError(f"password_file = {self.password_file!r}: there is no such file")
        self._check_seconds()
        self._check_tls(tls=location.tls)

    def _check_seconds(self) -> None:
        for name in ("connect_timeout_s", "timeout_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} = {seconds}: give seconds above 0")
        if self.ttl_s is not None and not 1.0 <= self.ttl_s <= TTL_S_MAX:
            raise ValueError(f"ttl_s = {self.ttl_s}: give 1 to {TTL_S_MAX:.0f} seconds, or leave it out")

    def _check_tls(self, *, tls: bool) -> None:
        files = {name: getattr(self, name) for name in ("ca_file", "cert_file", "key_file")}
        for name, value in files.items():
            if value is not None and not tls:
                raise ValueError(f'{name}: only for TLS; give a URL with "valkeys://", or leave it out')
            if value is not None and not os.path.isfile(value):  # noqa: PTH113  the value is text
                raise ValueError(f"{name} = {value!r}: there is no such file")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: give both, or neither")

    def password(self) -> str | None:
        """Password of the user at this moment; None: there is none.

        Raises:
            OSError: the file cannot be read.
        """
        if self.password_file is None:
            return os.environ.get(self.password_env) or None
        with open(self.password_file, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  the value is text
            return file.read().strip("\r\n") or None

    def sentinel_password(self) -> str | None:
        """Password of the sentinels at this moment; None: there is none."""
        return os.environ.get(self.sentinel_password_env) or None

    @property
    def location(self) -> Location:
        """Parsed URL."""
        return Location.parse(self.url, SENTINEL_PORT if self.mode == "sentinel" else PORT)
