from collections.abc import Callable

from testbed.experiments.experiment import Experiment

Load = Callable[..., Experiment]
Complain = Callable[..., str]

ROW = 'sites = ["A", "B"], rtt = "100 ms", rate = "100 Mbit/s"'


def test_a_pair_of_sites_can_differ_by_direction(load: Load) -> None:
    rows = (
        'from = "A", to = "B", delay = "30 ms", rate = "50 Mbit/s" },\n'
        '{ from = "B", to = "A", delay = "70 ms", rate = "10 Mbit/s"'
    )
    e = load(replace=(ROW, rows))
    down, up = e.network.links["a100-0", "client-0"], e.network.links["client-0", "a100-0"]
    assert (down.delay_s, down.rate_bps, up.delay_s, up.rate_bps) == (0.03, 5e7, 0.07, 1e7)
    assert e.problem.raw_rtt_s == ((0.1, 0.1),)
    assert e.problem.token_rtt_s[0][0] > 0.1 + 8 * 28672 * (1 / 5e7 + 1 / 1e7)


def test_a_matrix_gives_half_of_each_entry_to_its_direction(load: Load) -> None:
    e = load(
        'network={kind="matrix",sites=["A","B"],rtt=[[5,60],[140,2]],rtt_unit="ms",'
        'rate=[[1000,50],[10,1000]],rate_unit="Mbit/s"}'
    )
    assert e.network.links["a100-0", "client-0"].delay_s == 0.03
    assert e.network.links["client-0", "a100-0"].delay_s == 0.07
    assert e.network.links["client-0", "a100-0"].rate_bps == 1e7
    assert e.network.links["a100-0", "a100-1"].delay_s == 0.0025
    assert e.problem.raw_rtt_s == ((0.1, 0.1),)


def test_a_matrix_can_have_one_rate_for_all(load: Load) -> None:
    e = load('network={kind="matrix",sites=["A","B"],rtt=[[5,60],[60,2]],rtt_unit="ms",rate="1 Gbit/s"}')
    assert {link.rate_bps for link in e.network.links.values()} == {1e9}


def test_a_bad_matrix_is_refused_with_what_to_change(complaint: Complain) -> None:
    def said(rest: str) -> str:
        return complaint('network={kind="matrix",sites=["A","B"],' + rest + "}").rsplit(": network.", 1)[1]

    square = "rtt=[[5,60],[60,2]]"
    rate = 'rate="1 Gbit/s"'
    assert (
        said(f'rtt=[[5,60],[60]],rtt_unit="ms",{rate}')
        == "rtt: must be a 2 x 2 matrix, a row and a column per site"
    )
    assert said(f'rtt=[[5,60],[60,-1]],rtt_unit="ms",{rate}') == "rtt.1.1: must be at least 0, not -1"
    assert said(f'{square},rtt_unit="msec",{rate}').startswith(
        'rtt_unit: unknown unit "msec" (did you mean "ms"?)'
    )
    assert said(f'{square},rtt_unit="ms",rate=[[1,1],[1,1]]').startswith(
        "rate_unit: is missing; give one of bit/s"
    )
    assert (
        said(f'{square},rtt_unit="ms",rate=[[1,1],[1,0]],rate_unit="Gbit/s"')
        == "rate.1.1: must be more than 0, not 0"
    )
    assert said(f'{square},rtt_unit="ms",{rate},rate_unit="Gbit/s"').startswith(
        "rate_unit: is only for a matrix of rates"
    )
    assert said(f'{square},rtt_unit="ms",rate=3').startswith('rate: must be text such as "100 Mbit/s"')
