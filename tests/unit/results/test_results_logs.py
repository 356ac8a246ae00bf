import pytest

from nodes.records import Routed
from testbed.errors import UserError
from testbed.experiments.provenance import PROVENANCE, provenance
from testbed.results.logs import read_logs
from testbed.rundir import write_json
from tests.unit.results.conftest import MakeRun

CHAIN = [(0, 0, 4)]


def test_a_record_that_a_kill_cut_short_is_dropped_and_its_bytes_are_counted(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN, n_tokens=2)
    log = run.path / "events" / "c0.log"
    whole = log.read_bytes()
    run.token(0, 2, 2.0, [(0, 0, 4, 2.0, 2.1, 2.2, 2.3, 1000, 1000)])
    cut = log.read_bytes()[: len(whole) + 30]
    log.write_bytes(cut)
    records = read_logs(run.path)
    assert records.dropped_bytes == 30
    assert [token.token for token in records.requests[0].tokens] == [0, 1]


UNKNOWN = b"\x93\xa5other\x01\x02"
"""A whole record, but none that this code writes."""


@pytest.mark.parametrize("tail", [b"\0" * 64, b"\xc1garbage", UNKNOWN])
def test_bytes_at_the_end_that_are_no_record_are_dropped_and_counted(make_run: MakeRun, tail: bytes) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    log = run.path / "events" / "c0.log"
    log.write_bytes(log.read_bytes() + tail)
    write_json(run.path / PROVENANCE, provenance())
    records = read_logs(run.path)
    assert records.dropped_bytes == len(tail)
    assert records.requests[0].status == "completed"


def test_records_of_another_version_are_not_taken_for_damage(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    log = run.path / "events" / "c0.log"
    log.write_bytes(UNKNOWN + log.read_bytes())
    other = {**provenance(), "code": "testbed 0.0.9", "code_sha256": "0" * 64}
    write_json(run.path / PROVENANCE, other)
    with pytest.raises(
        UserError, match=r"rebuild the run's tables with the version that made it \(testbed 0.0.9\)"
    ):
        read_logs(run.path)


def test_the_logs_of_several_clients_become_one_list_in_the_order_of_the_requests(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 3, clients=[1, 0, 1])
    for index in (1, 0, 2):
        run.serve(index, float(index), CHAIN)
    records = read_logs(run.path)
    assert [(r.index, r.client) for r in records.requests] == [(0, "c1"), (1, "c0"), (2, "c1")]


def test_refused_attempts_are_counted_and_the_last_chain_is_the_one_that_served(make_run: MakeRun) -> None:
    run = make_run()
    run.arrive(0, 0.0)
    for at_s in (0.1, 1.1):
        run.log(Routed(0, at_s, [(1, 0, 4)], at_s, 0.002, 0.003))
        run.reject(0, at_s + 0.1, 1)
    run.admit(0, CHAIN, 3.2, 3.3)
    [request] = read_logs(run.path).requests
    assert request.n_rejections == 2
    assert request.chain == [(0, 0, 4)]
    assert request.opening_at_s == 3.2
    assert request.wait_expected_s == 1.1
    assert request.decision_s == [0.002, 0.002, 0.001]
    assert request.status == "unfinished"


def test_an_unfinished_request_was_last_seen_at_its_last_record(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 3)
    end_s = run.serve(0, 0.0, CHAIN, n_tokens=1)
    run.arrive(1, 1.0)
    run.arrive(2, 2.0)
    run.reject(2, 2.4, 0)
    assert [r.last_seen_at_s for r in read_logs(run.path).requests] == [end_s, 1.0, 2.4]


def test_a_run_without_any_record_has_no_requests(make_run: MakeRun) -> None:
    records = read_logs(make_run().path)
    assert records.requests == []
    assert records.dropped_bytes == 0
