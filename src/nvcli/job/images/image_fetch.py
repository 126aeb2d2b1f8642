"""ImageFetcher: fetches the images that rows name by `https:` URLs, from the domains of `job.media_domains` alone.

Rows are untrusted and must not reach what only this machine can: no socket is made for an address of this machine, its
network or its link, whatever a name resolves to, and redirects follow the same rules.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any

from nvcli.core.system.terminal_text import without_secrets
from nvcli.core.validation import shorten, show
from nvcli.errors import ConfigError, RowError, first_line
from nvcli.job.rows.image_values import OF_BYTES

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from yarl import URL

_SECONDS = 30.0
"""Seconds for an image, with its redirects."""
_MOST_REDIRECTS = 5
_MOST_CONNECTIONS = 64
_CHUNK = 1 << 16
_GRACE_SECONDS = 0.25
"""Seconds in which closed TLS connections end, which aiohttp does not wait for (its page on graceful shutdown)."""
_HTTPS_PORT = 443
_DOMAIN = re.compile(r"(?:\*\.)?[a-z0-9-]+(?:\.[a-z0-9-]+)*(?::\d{1,5})?")
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class MediaDomains:
    """The domains of `job.media_domains`."""

    names: frozenset[str]

    @classmethod
    def of(cls, names: Sequence[str]) -> MediaDomains:
        """Read names such as `images.example.com`, `*.example.com` (every domain below it) and `example.com:8443`.
        Raises ConfigError."""
        lower = frozenset(name.lower() for name in names)
        for name in sorted(lower):
            if not _DOMAIN.fullmatch(name):
                raise ConfigError(
                    f"`job.media_domains` has {show(name)}; allowed: domains such as images.example.com, *.example.com "
                    "or example.com:8443"
                )
        if lower and find_spec("aiohttp") is None:
            raise ConfigError("`job.media_domains` is given, and aiohttp is not installed: pip install 'nvcli[images]'")
        return cls(lower)

    def why_not(self, url: URL) -> str | None:
        """Return why a URL must not be fetched; None: it may be."""
        if url.scheme != "https":
            return f"images are fetched by https alone, not by {url.scheme}"
        host = (url.host_subcomponent or "").lower().rstrip(".")
        port = "" if url.port == _HTTPS_PORT else f":{url.port}"
        parents = host.split(".")[1:]
        allowed = {host + port, *("*." + ".".join(parents[at:]) + port for at in range(len(parents)))}
        if self.names.isdisjoint(allowed):
            return f"`job.media_domains` has no {host + port}; add it there, or download the image and give its path"
        return None


def is_public(address: str) -> bool:
    """Tell whether an IP address is one of the internet's, not of this machine, its network, its link or a group."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and (inner := _inner(ip)) is not None:
        ip = inner
    return ip.is_global and not ip.is_multicast


def _inner(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which packets for an IPv6 address may be sent on; None: it has none."""
    teredo = ip.teredo
    if ip in _NAT64:
        return IPv4Address(ip.packed[-4:])
    return ip.ipv4_mapped or ip.sixtofour or (None if teredo is None else teredo[1])


class ImageFetcher:
    """Fetches images, from any number of threads. Its own thread starts with the first one."""

    def __init__(
        self,
        domains: MediaDomains,
        *,
        max_bytes: int,
        max_seconds: float = _SECONDS,
        may_connect: Callable[[str], bool] = is_public,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        """`may_connect` says of each IP address whether a connection to it may be opened; `certificates` None: those of
        the system are trusted."""
        self._domains, self._max_bytes, self._max_seconds = domains, max_bytes, max_seconds
        self._may_connect, self._certificates = may_connect, certificates
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: ClientSession | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def fetch(self, source: str) -> bytes:
        """Return the bytes behind a URL. Raises RowError: `invalid_image` for one that must not be fetched or is too
        large, `image_unavailable` for one that its server does not give."""
        import aiohttp
        from yarl import URL

        try:
            url = URL(source)
        except ValueError as error:
            raise invalid_image(source, f"it is no URL: {error}") from None
        if problem := self._domains.why_not(url):  # before anything is started
            raise invalid_image(source, problem)
        try:
            return self._run(self._fetch(url, source))
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, _NotPublic):
                raise invalid_image(source, str(error.os_error)) from None
            raise _unavailable(source, f"its server cannot be reached: {first_line(error)}") from None
        except TimeoutError:
            raise _unavailable(source, f"it did not come within {self._max_seconds:g} seconds") from None
        except CancelledError:
            raise RowError("aborted", "the run ends") from None

    def close(self) -> None:
        """Cancel all fetches. Idempotent."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop)

    def _run(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        with self._lock:
            if self._is_closed:
                work.close()
                raise CancelledError
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="nvcli-fetch", daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(_GRACE_SECONDS)
        loop.stop()

    async def _fetch(self, url: URL, source: str) -> bytes:
        async with asyncio.timeout(self._max_seconds):
            for _ in range(_MOST_REDIRECTS + 1):
                if problem := self._domains.why_not(url):
                    raise invalid_image(source, f"it leads to {without_secrets(str(url))}, and {problem}")
                async with self._open_session().get(url, allow_redirects=False) as response:
                    target = response.headers.get("Location")
                    if response.status in (301, 302, 303, 307, 308) and target is not None:
                        url = _joined(url, target, source)
                        continue
                    if response.status != 200:
                        raise _unavailable(
                            source, f"its server answered {response.status} {response.reason or ''}".strip()
                        )
                    return await self._read(response, source)
        raise _unavailable(source, f"it leads to another place more than {_MOST_REDIRECTS} times")

    async def _read(self, response: ClientResponse, source: str) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK):
            data += chunk
            if len(data) > self._max_bytes:
                raise invalid_image(source, f"it has more than {self._max_bytes:,} bytes")
        return bytes(data)

    def _open_session(self) -> ClientSession:
        """Return the session of all fetches, which does what the environment and servers ask for as little as it can:
        no proxies, no cookies, no compression."""
        if self._session is None:
            import aiohttp

            connector = aiohttp.TCPConnector(
                limit=_MOST_CONNECTIONS,
                ssl=True if self._certificates is None else self._certificates,
                socket_factory=self._socket,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "nvcli"},
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Make the socket for an address, which is the one that it is connected to. Raises _NotPublic."""
        family, kind, protocol, _, place = address
        if not self._may_connect(place[0]):
            raise _NotPublic("its server has no address on the internet, but one of this machine or its network")
        return socket.socket(family, kind, protocol)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _NotPublic(OSError):
    """An address to which no connection may be opened."""


def _joined(url: URL, target: str, source: str) -> URL:
    from yarl import URL

    try:
        return url.join(URL(target))
    except ValueError as error:
        raise _unavailable(source, f"it leads to {show(target)}, which is no URL: {error}") from None


def invalid_image(source: str, problem: str) -> RowError:
    """Return the error of a row whose image `source` has a problem."""
    return RowError("invalid_image", _about(source, problem))


def _unavailable(source: str, problem: str) -> RowError:
    return RowError("image_unavailable", _about(source, problem))


def _about(source: str, problem: str) -> str:
    if source.startswith(OF_BYTES):
        return f"the image of {len(source.rstrip('=')[len(OF_BYTES) :]) * 3 // 4:,} bytes: {problem}"
    return f"the image {show(shorten(without_secrets(source)))}: {problem}"
