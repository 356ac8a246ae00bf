import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.experiments.units import DURATION, RATE, SIZE, Dimension

DIMENSIONS = pytest.mark.parametrize("dimension", [DURATION, RATE, SIZE], ids=lambda d: d.name)


@pytest.mark.parametrize(
    ("dimension", "text", "value"),
    [
        (DURATION, "100 ms", 0.1),
        (DURATION, "1.5 us", 1.5e-6),
        (DURATION, "1.5 µs", 1.5e-6),
        (DURATION, "250 s", 250.0),
        (DURATION, "2 min", 120.0),
        (DURATION, "3.2197ms", 0.0032197),
        (RATE, "1 Gbit/s", 1e9),
        (RATE, "100 Mbit/s", 1e8),
        (SIZE, "79.13 GB", 79.13e9),
        (SIZE, "2 GiB", 2 * 1024.0**3),
        (SIZE, " 1.5e3 B ", 1500.0),
    ],
)
def test_quantities_mean_what_they_say(dimension: Dimension, text: str, value: float) -> None:
    assert dimension.parse(text) == value


@DIMENSIONS
@given(data=st.data())
def test_a_written_quantity_reads_back_to_the_same_float(dimension: Dimension, data: st.DataObject) -> None:
    taken = st.floats(min_value=dimension.smallest, max_value=dimension.largest)
    value = data.draw(st.just(0.0) | taken)
    assert dimension.parse(dimension.format(value)) == value


def test_quantities_are_written_in_the_unit_that_people_would_take() -> None:
    assert DURATION.format(0.0032197) == "3.2197 ms"
    assert DURATION.format(0.0) == "0 s"
    assert DURATION.format(250.0) == "250 s"
    assert RATE.format(1e8) == "100 Mbit/s"
    assert RATE.format(0.0) == "0 bit/s"
    assert SIZE.format(1323397667.2) == "1.3233976672 GB"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "5 msec",
            'unknown unit "msec" (did you mean "ms"?); a duration is given in h, min, s, ms, us, µs, ns',
        ),
        ("5", '"5" has no unit; a duration is given in h, min, s, ms, us, µs, ns'),
        ("soon", 'must be a duration with a unit such as "100 ms", not "soon"'),
        ("-5 ms", 'must not be negative, but is "-5 ms"'),
        ("1e999 s", '"1e999 s" is too large; the most is 1000000000 s'),
        ("1e308 s", '"1e308 s" is too large; the most is 1000000000 s'),
        ("300000 h", '"300000 h" is too large; the most is 1000000000 s'),
    ],
)
def test_a_bad_quantity_is_refused_with_what_to_write(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        DURATION.parse(text)
    assert str(caught.value) == expected


def test_the_unit_of_another_kind_of_quantity_is_unknown() -> None:
    with pytest.raises(ValueError, match="a rate is given in bit/s, kbit/s, Mbit/s, Gbit/s"):
        RATE.parse("100 MB")


@DIMENSIONS
def test_the_largest_and_smallest_quantities_are_taken_and_nothing_beyond(dimension: Dimension) -> None:
    assert dimension.parse(dimension.format(dimension.largest)) == dimension.largest
    with pytest.raises(ValueError, match="is too large; the most is"):
        dimension.parse(dimension.format(dimension.largest * 1.001))
    if dimension.smallest > 0:
        assert dimension.parse(dimension.format(dimension.smallest)) == dimension.smallest
        with pytest.raises(ValueError, match="is too small; the least is"):
            dimension.parse(dimension.format(dimension.smallest / 2))
