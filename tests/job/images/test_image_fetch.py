"""Images are fetched from the job's domains alone, and never from this machine's network."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvcli.errors import ConfigError, RowError
from nvcli.job.images.image_fetch import ImageFetcher, MediaDomains, is_public

CERTIFICATE = Path(__file__).parents[2] / "localhost.pem"


class Images(http.server.BaseHTTPRequestHandler):
    """A server that has one image, and redirects."""

    seen: list[str]
    may_answer: threading.Event
    """What is slow waits for it."""

    def do_GET(self) -> None:
        name, _, target = self.path[1:].partition("?")
        self.seen.append(self.path)
        if name == "slow":
            self.may_answer.wait(10)
        if name == "to":
            self.send_response(302)
            self.send_header("Location", target)
        else:
            self.send_response(404 if name == "none" else 200, None)
        body = b"x" * (2000 if name == "large" else 10)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


class Quiet(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave while a slow answer is written."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    Images.seen, Images.may_answer = [], threading.Event()
    server = Quiet(("127.0.0.1", 0), Images)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield f"localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetcher(address: str) -> Iterator[ImageFetcher]:
    """It trusts the server, and may reach this machine by IPv4."""
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    made = ImageFetcher(
        MediaDomains.of([address]),
        max_bytes=1000,
        max_seconds=1,
        may_connect=lambda ip: ip == "127.0.0.1",
        certificates=trusting,
    )
    yield made
    Images.may_answer.set()  # so that connections end
    made.close()
    Images.may_answer.clear()


def refusal(fetcher: ImageFetcher, url: str) -> RowError:
    with pytest.raises(RowError) as caught:
        fetcher.fetch(url)
    return caught.value


def test_images_are_fetched_and_redirects_followed(fetcher: ImageFetcher, address: str) -> None:
    for path in ("a.png", "to?a.png", f"to?https://{address}/to?/a.png"):
        assert fetcher.fetch(f"https://{address}/{path}") == b"x" * 10


@pytest.mark.parametrize(
    ("url", "kind", "problem"),
    [
        ("https://example.com/a.png", "invalid_image", "`job.media_domains` has no example.com; add it there"),
        ("https://localhost/a.png", "invalid_image", "`job.media_domains` has no localhost;"),
        ("https://{}@example.com/a.png", "invalid_image", "`job.media_domains` has no example.com;"),
        ("http://{}/a.png", "invalid_image", "images are fetched by https alone, not by http"),
        ("ftp://{}/a.png", "invalid_image", "images are fetched by https alone, not by ftp"),
        ("https://[::1/a.png", "invalid_image", "it is no URL"),
        ("https://{}/to?https://127.0.0.1/a", "invalid_image", "it leads to https://127.0.0.1/a, and `job.media_dom"),
        ("https://{}/to?http://{}/a.png", "invalid_image", "images are fetched by https alone"),
        ("https://{}/large", "invalid_image", "it has more than 1,000 bytes"),
        ("https://{}/to?to", "image_unavailable", "it leads to another place more than 5 times"),
        ("https://{}/none", "image_unavailable", "its server answered 404 Not Found"),
        ("https://{}/slow", "image_unavailable", "it did not come within 1 seconds"),
    ],
)
def test_others_are_errors(fetcher: ImageFetcher, address: str, url: str, kind: str, problem: str) -> None:
    error = refusal(fetcher, url.replace("{}", address))
    assert error.type == kind
    assert problem in error.message


def test_addresses_of_this_machine_are_not_reached(address: str) -> None:
    """By its name, and by its number."""
    port = address.partition(":")[2]
    fetcher = ImageFetcher(MediaDomains.of([address, f"127.0.0.1:{port}"]), max_bytes=1000)
    Images.seen.clear()
    for host in ("localhost", "127.0.0.1"):
        error = refusal(fetcher, f"https://{host}:{port}/a.png?key=secret")
        assert error.type == "invalid_image"
        assert "its server has no address on the internet" in error.message
        assert "secret" not in error.message
    assert Images.seen == []
    fetcher.close()
    assert refusal(fetcher, f"https://{address}/a.png").type == "aborted"


def test_certificates_are_checked(address: str) -> None:
    fetcher = ImageFetcher(MediaDomains.of([address]), max_bytes=1000, may_connect=lambda ip: True)
    error = refusal(fetcher, f"https://{address}/a.png")
    fetcher.close()
    assert error.type == "image_unavailable"
    assert "certificate" in error.message


def test_closing_ends_what_is_fetched(fetcher: ImageFetcher, address: str) -> None:
    timer = threading.Timer(0.1, fetcher.close)
    timer.start()
    assert refusal(fetcher, f"https://{address}/slow").type == "aborted"
    Images.may_answer.set()
    timer.join()


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "10.0.0.1",
            "172.16.5.5",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
        ),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:a9fe:a9fe"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://Images.Example.com/a", True),
        ("https://images.example.com:443/a", True),
        ("https://images.example.com:8443/a", False),
        ("https://a.b.cdn.org/a", True),
        ("https://cdn.org/a", False),
        ("https://evilcdn.org/a", False),
        ("https://images.example.com.evil.org/a", False),
        ("https://other.net:8443/a", True),
        ("https://other.net/a", False),
    ],
)
def test_domains(url: str, allowed: bool) -> None:
    from yarl import URL

    domains = MediaDomains.of(["images.example.com", "*.cdn.org", "other.net:8443"])
    assert (domains.why_not(URL(url)) is None) == allowed


@pytest.mark.parametrize("name", ["https://example.com", "example.com/a", "", "*", "a b"])
def test_names_that_are_no_domains(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`job\.media_domains` has .*; allowed: domains such as"):
        MediaDomains.of([name])
