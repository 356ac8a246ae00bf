"""Which requests the page's server refuses."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from testbed.page.guard import TOKEN_HEADER, refusal

HOST = "127.0.0.1:8765"


def refused(method: str = "GET", **headers: str) -> bool:
    named = {"Host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return refusal(make_mocked_request(method, "/api/faults", headers=named), "secret") is not None


@pytest.mark.parametrize("host", [HOST, "localhost:8765", "[::1]:8765", "localhost"])
def test_the_page_is_shown_to_this_machine_by_any_of_its_names(host: str) -> None:
    assert not refused(Host=host)


@pytest.mark.parametrize("host", ["evil.example:8765", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1:8765"])
def test_a_name_that_others_control_is_refused(host: str) -> None:
    assert refused(Host=host)


def test_a_request_from_another_site_is_refused_even_with_the_token() -> None:
    token = {TOKEN_HEADER: "secret"}
    assert refused("POST", Origin="http://evil.example", **token)
    assert refused("POST", Origin="null", **token)
    assert refused("POST", Origin=f"http://{HOST.replace('8765', '1')}", **token)
    assert refused("POST", Sec_Fetch_Site="cross-site", **token)
    assert refused("GET", Sec_Fetch_Site="cross-site")
    assert refused("POST", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", **token)


def test_a_link_on_another_site_may_lead_to_the_page() -> None:
    assert not refused("GET", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")


def test_a_change_needs_the_token() -> None:
    assert refused("POST", Origin=f"http://{HOST}")
    assert refused("POST", **{TOKEN_HEADER: "wrong"})
    assert refused("POST", **{TOKEN_HEADER: "sécret"})
    assert not refused(
        "POST", Origin=f"http://{HOST}", Sec_Fetch_Site="same-origin", **{TOKEN_HEADER: "secret"}
    )
