"""Who may ask the page's server for what: this machine's own browser, and to change things only with the token.

Any web site that a browser visits can have it send requests to this machine; names that others control can
point here. So the name asked for must be one of this machine, a request from another site is refused, and what
changes something needs a secret that stands in the page's address after ``#``, which no browser sends anywhere.
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
    """Why ``request`` is refused, in one sentence; ``None``: it is not."""
    host = request.headers.get("Host", "")
    if _host_name(host) not in _NAMES:
        return "this page is for this machine only: ask for it as 127.0.0.1 or localhost"
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return "requests from other sites are refused"
    is_reading = request.method in ("GET", "HEAD")
    # A link in a terminal that is itself a web page leads here: the browser then shows nothing to that page.
    is_link = is_reading and request.headers.get("Sec-Fetch-Mode") == "navigate"
    if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none") and not is_link:
        return "requests from other sites are refused"
    if is_reading:
        return None
    given = request.headers.get(TOKEN_HEADER, "")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        return "the page's token is missing or wrong: open the whole address that was printed, with what follows #"
    return None


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Have browsers load nothing from elsewhere, and show the page nowhere else."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
