"""Reads of whole objects over plain HTTP, received into the caller's buffer.

The client of a storage library returns an object as fresh bytes, which then are copied. Without TLS, the standard
library's client receives into the buffer itself, for a third of the processor time. It only moves bytes: the storage
library signs each request, with the credentials of that moment. Every answer but a plain success is left to that
library, which asks again: it knows errors, redirects, retries and how to renew credentials. Where that is needed again
and again, as on a server that states no length, each object costs two requests: plain reads rest then. An error
with a long page is not asked for again: the read has failed.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from tierkv.abc.logs import plugin_logger
from tierkv_fsspec.stores.store import FailedAnswerError, TooLongError

OBJECT_BYTES_MIN = 512 << 10
"""Shorter objects are left to the storage library: the standard library's client costs more per request."""
FALLBACKS_MAX = 8
"""Objects in a row that only the storage library received, after which plain reads rest."""
REST_S = 60.0
"""Seconds of such a rest."""
ERROR_BYTES_MAX = 256 << 10
"""Longest error page that the storage library may receive: it holds several copies of it."""
_PIECE_BYTES = 256 << 10
"""Bytes between two looks at the time, of a connection that ends with its answer."""
_log = plugin_logger(__name__)


class PlainReads:
    """Reads on connections that are kept. May be used on any threads.

    Args:
        sign: returns the signed URL of an object, for a GET that begins soon.
        connect_timeout_s: seconds to establish a connection.
        read_timeout_s: seconds for one request.
        kept_max: connections that are kept while no request uses them.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        sign: Callable[[str], str],
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
        kept_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sign = sign
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._kept: deque[http.client.HTTPConnection] = deque(maxlen=kept_max)
        self._is_closed = False
        self._clock = clock
        self._lock = threading.Lock()  # guards the two fields below
        self._fallbacks = 0  # objects in a row that only the storage library received
        self._rests_until_s = 0.0
        self._why = ""

    @property
    def rests(self) -> bool:
        """Whether the storage library should be asked at once: these reads did not work, again and again."""
        return self._fallbacks >= FALLBACKS_MAX and self._clock() < self._rests_until_s

    def fell_back(self) -> None:
        """Note that the storage library received an object after this way did not work."""
        with self._lock:
            self._fallbacks += 1
            if self._fallbacks >= FALLBACKS_MAX:
                self._rests_until_s = self._clock() + REST_S
            is_news = self._fallbacks == FALLBACKS_MAX
        if is_news:
            _log.warning("objects are received by obstore for now: plain requests do not work (%s)", self._why)

    def _note_success(self) -> None:
        if not self._fallbacks:
            return
        with self._lock:
            is_news, self._fallbacks = self._fallbacks >= FALLBACKS_MAX, 0
        if is_news:
            _log.warning("objects are received over plain HTTP again")

    def read_into(self, path: str, buffer: memoryview) -> int | None:
        """Receive an object into the start of ``buffer``.

        Returns:
            Its length. None: this way did not work, and the storage library must be asked; bytes of the buffer may
            have changed.

        Raises:
            TooLongError: the object does not fit. No byte of it was received.
            FailedAnswerError: the server sends a long error page.
            TimeoutError: it did not arrive in time.
            ConnectionError: no connection was made in time.
        """
        url = urlsplit(self._sign(path))
        deadline_s = time.monotonic() + self._read_timeout_s
        kept = self._take_kept()
        if kept is not None:
            try:
                return self._answered(kept, url, buffer, deadline_s)
            except (http.client.HTTPException, ConnectionError):
                kept.close()  # the server closed it while it was idle, perhaps: once more on a fresh one
            except BaseException:
                kept.close()
                raise
        fresh = self._connect(url.netloc)
        if fresh is None:
            return None
        try:
            return self._answered(fresh, url, buffer, deadline_s)
        except (http.client.HTTPException, ConnectionError) as error:
            fresh.close()
            self._why = f"{type(error).__name__}: {error}"
            return None
        except BaseException:
            fresh.close()
            raise

    def close(self) -> None:
        """Close the connections that no request uses; the others close when their requests have ended."""
        self._is_closed = True
        while (kept := self._take_kept()) is not None:
            kept.close()

    def _connect(self, address: str) -> http.client.HTTPConnection | None:
        """Return a new connection; None if there is no way, of which the storage library knows the reason."""
        connection = http.client.HTTPConnection(address, timeout=self._connect_timeout_s)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError:
            raise ConnectionError(f"no connection to {address} within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            self._why = str(error)
            return None
        return connection

    def _answered(
        self, connection: http.client.HTTPConnection, url: SplitResult, buffer: memoryview, deadline_s: float
    ) -> int | None:
        length = self._ask(connection, url, buffer, deadline_s)
        if length is not None:
            self._note_success()
        return length

    def _ask(
        self, connection: http.client.HTTPConnection, url: SplitResult, buffer: memoryview, deadline_s: float
    ) -> int | None:
        self._limit_time(connection, deadline_s)
        connection.request("GET", f"{url.path}?{url.query}", headers={"Accept-Encoding": "identity"})
        answer = connection.getresponse()
        length = answer.length
        encoding = answer.headers.get("Content-Encoding")
        if answer.status != HTTPStatus.OK or length is None or encoding:
            connection.close()
            if answer.status >= HTTPStatus.BAD_REQUEST and (length or 0) > ERROR_BYTES_MAX:
                raise FailedAnswerError(answer.status)
            self._why = f"status {answer.status}, length {length}, encoding {encoding}"
            return None
        if length > len(buffer):
            connection.close()
            raise TooLongError(length, len(buffer))
        if length:
            self._receive(connection, answer, buffer[:length], deadline_s)
        answer.close()  # the client cannot know that the body was received
        self._keep(connection, answer)
        return length

    def _receive(
        self,
        connection: http.client.HTTPConnection,
        answer: http.client.HTTPResponse,
        body: memoryview,
        deadline_s: float,
    ) -> None:
        """Fill ``body``: with what came beside the headers, then from the socket.

        The kernel waits for all bytes and keeps the time, so one call of the system takes most objects. The client's
        own ``readinto`` makes two for each piece that has arrived, and other threads wait between them.
        """
        done = answer.readinto(body[: len(answer.peek())])
        connected = connection.sock
        if connected is not None:
            connected.settimeout(None)
        while done < len(body):
            left_s = self._left_s(deadline_s)
            count: int | None
            if connected is None:  # the connection ends with the answer, which has its socket
                count = answer.readinto(body[done : done + _PIECE_BYTES])
            else:
                count = _received(connected, body[done:], left_s)
            if count == 0:
                raise http.client.IncompleteRead(b"", len(body) - done)
            done += count or 0

    def _limit_time(self, connection: http.client.HTTPConnection, deadline_s: float) -> None:
        left_s = self._left_s(deadline_s)
        if connection.sock is not None:  # closed by the last answer: the client connects anew
            connection.sock.settimeout(left_s)

    def _left_s(self, deadline_s: float) -> float:
        """Return the time left.

        Raises:
            TimeoutError: none is left.
        """
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the object did not arrive within {self._read_timeout_s:g} s")
        return left_s

    def _keep(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        if answer.will_close or self._is_closed or len(self._kept) == self._kept.maxlen:
            connection.close()
        else:
            self._kept.append(connection)

    def _take_kept(self) -> http.client.HTTPConnection | None:
        try:
            return self._kept.pop()
        except IndexError:
            return None


def has_proxy(address: str) -> bool:
    """Whether the environment names a proxy for this address; then the storage library knows how to use it."""
    url = urlsplit(address)
    return "http" in getproxies() and not proxy_bypass(url.hostname or "")


def _received(connected: socket.socket, buffer: memoryview, wait_s: float) -> int | None:
    """Receive bytes until a buffer is full, the time is up, or the connection ends.

    Returns:
        Number of bytes; 0 at the end of the connection, None if the time was up before the first.
    """
    time_left = struct.pack("ll", *divmod(max(1, round(wait_s * 1e6)), 1_000_000))  # 0 would mean for ever
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time_left)
    try:
        return connected.recv_into(buffer, 0, socket.MSG_WAITALL)
    except BlockingIOError:
        return None
