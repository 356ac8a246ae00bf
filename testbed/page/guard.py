"""Decides which requests the page's server refuses.

Only browsers on this machine may read, and only with the token may they change something.

Any web site in a browser can make it send requests to this machine, and a foreign host name can resolve to
it. So the host name must be one of this machine (against DNS rebinding), requests from other sites are
refused, and changes need a token. The token is in the page's address after ``#``, a part that browsers send
to no server.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web

TOKEN_HEADER = "X-Testbed-Token"
_NAMES = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def refusal(request: web.BaseRequest, token: str) -> str | None:
    """Return why ``request`` is refused, in one sentence, or None if it is allowed."""
    host = request.headers.get("Host", "")
    if _host_name(host) not in _NAMES:
        return "this page is for this machine only: open it as 127.0.0.1 or localhost"
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return "requests from other sites are refused"
    is_reading = request.method in ("GET", "HEAD")
    # A terminal in a web page can link here. That is safe: that page cannot read the response.
    is_link = is_reading and request.headers.get("Sec-Fetch-Mode") == "navigate"
    if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none") and not is_link:
        return "requests from other sites are refused"
    if is_reading:
        return None
    given = request.headers.get(TOKEN_HEADER, "")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        return "the page's token is missing or wrong: open the whole printed address, with the part after #"
    return None


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add headers by which browsers load nothing from other sites, and show the page in no other site."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
