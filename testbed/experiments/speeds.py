"""Reads the rate of a link from what a map's label says of it: "OC-192", "10 Gbps", "2 x STM-16"."""

from __future__ import annotations

import re
from collections.abc import Iterator

_CARRIERS_BPS = {"oc": 51.84e6, "stm": 155.52e6}
"""SONET and SDH: bits per second of a carrier of number 1."""
_CLASSES_BPS = {"t1": 1.544e6, "ds1": 1.544e6, "e1": 2.048e6, "e3": 34.368e6, "t3": 44.736e6, "ds3": 44.736e6}
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_ETHERNET_BPS = {"fastethernet": 100e6, "gigabitethernet": 1e9, "gige": 1e9, "gbe": 1e9}
_SPEED = re.compile(
    r"""(?<![\w.])(?:(?P<times>\d+)\s*[x\u00d7*]\s*)?(?:
        (?P<carrier>oc|stm)[\s-]*(?P<level>\d+)c?
        | (?P<class>[te][13]|ds-?[13])
        | (?P<number>\d+(?:\.\d+)?)(?:
            \s*(?P<prefix>[kmgt])(?:(?:iga|ega)?bits?(?:/s|ps)?|b(?:/s|ps|e)?|ige|e|ps)
            | (?P<bare>(?-i:[KMGT]))
        )
        | (?P<ethernet>fast\s?ethernet|gigabit\s?ethernet|gige|gbe)
    )(?![\w.])""",
    re.IGNORECASE | re.VERBOSE,
)
_UNSURE = re.compile(r"[<>~+?]|\d,\d|\b(?:to|upto|[a-z]\s*x)\b|\d\s*-\s*\d+\s*[kmgt]", re.IGNORECASE)
"""A range, a number with a comma, or an unknown count."""
_SAME_RATIO = 0.01
"""Two rates of a label that differ by less are one: an STM-64 is 9.95 Gbit/s, and called 10."""


def speed_bps(text: str) -> float | None:
    """Returns the rate in bits per second that a label states.

    ``None`` if it states none, a range, or several that differ.
    """
    if _UNSURE.search(text):
        return None
    found = list(_speeds(text))
    if not found or max(found) > (1 + _SAME_RATIO) * min(found):
        return None
    return found[0]


def _speeds(text: str) -> Iterator[float]:
    for match in _SPEED.finditer(text):
        if match["carrier"]:
            one_bps = _CARRIERS_BPS[match["carrier"].lower()] * int(match["level"])
        elif match["class"]:
            one_bps = _CLASSES_BPS[match["class"].lower().replace("-", "")]
        elif match["ethernet"]:
            one_bps = _ETHERNET_BPS[re.sub(r"\s", "", match["ethernet"].lower())]
        else:
            one_bps = float(match["number"]) * _PREFIXES[(match["prefix"] or match["bare"]).lower()]
        yield int(match["times"] or 1) * one_bps
