"""The real memory of servers, compared with the model's."""

from __future__ import annotations

import asyncio
import contextlib

from nodes.control import ControlError
from nodes.messages import GetStatus, ServerStatus
from testbed.experiments import load_experiment
from testbed.runtime.servermemory import ServerMemory
from tests.support.data_plane import status


def with_memory(cache_bytes: float, used_bytes: float) -> ServerStatus:
    memory = {"blocks_bytes": 1000.0, "cache_bytes": cache_bytes, "resident_bytes": 5.0}
    return status(memory=memory, first_block=2, last_block=5, cache_used_bytes=used_bytes)


class Peer:
    """A server's end of the control plane that answers with ``status``, or has ended."""

    def __init__(self, answer: ServerStatus | None) -> None:
        self._answer = answer
        self.n_asked = 0
        self.asked_again = asyncio.Event()

    async def ask(self, question: GetStatus) -> ServerStatus:
        self.n_asked += 1
        if self.n_asked == 2:
            self.asked_again.set()
        if self._answer is None:
            raise ControlError("gone")
        return self._answer


def test_the_moment_with_most_memory_is_kept_with_the_models_count_of_that_moment() -> None:
    problem = load_experiment("bloom-tiny").problem
    memory = ServerMemory(problem)
    for cache_bytes, used_bytes in ((0.0, 0.0), (300.0, 200.0), (100.0, 100.0)):
        memory.note("small-0", with_memory(cache_bytes, used_bytes))
    assert memory.largest == {
        "small-0": {
            "real_bytes": 1300.0,
            "model_bytes": problem.model.block_bytes * 3 + 200.0,
            "blocks_bytes": 1000.0,
            "cache_bytes": 300.0,
            "resident_bytes": 5.0,
        }
    }


def test_sessions_that_were_recorded_are_counted_to_the_last_report() -> None:
    memory = ServerMemory(load_experiment("bloom-tiny").problem)
    for cache_bytes, n_recorded in ((300.0, 1.0), (100.0, 2.0)):
        status = with_memory(cache_bytes, cache_bytes)
        status.memory["n_recorded"] = n_recorded
        memory.note("small-0", status)
    largest = memory.largest["small-0"]
    assert (largest["cache_bytes"], largest["n_recorded"]) == (300.0, 2.0)


def test_on_a_gpu_what_its_allocator_has_given_out_is_what_is_real() -> None:
    problem = load_experiment("bloom-tiny").problem
    memory = ServerMemory(problem)
    there = with_memory(300.0, 200.0)
    there.memory["device_allocated_bytes"] = 1400.0
    memory.note("small-0", there)
    assert memory.largest["small-0"]["real_bytes"] == 1400.0


async def test_a_server_that_has_ended_does_not_end_the_watch_of_the_others() -> None:
    memory = ServerMemory(load_experiment("bloom-tiny").problem)
    peers = {"large-0": Peer(None), "small-0": Peer(with_memory(1.0, 1.0)), "client-0": Peer(None)}
    watching = asyncio.create_task(memory.watch(peers))  # type: ignore[arg-type]
    await peers["small-0"].asked_again.wait()  # the first answer has been noted
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert list(memory.largest) == ["small-0"]
    assert peers["client-0"].n_asked == 0
