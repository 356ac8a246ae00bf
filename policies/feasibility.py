"""Error messages for placements that do not fit: the missing blocks and memory, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from policies.greedy import block_counts
from policies.problem import InfeasiblePlacement, Problem, ServerSpec


def block_list(blocks: Sequence[int]) -> str:
    """Returns ``blocks`` (ascending) as text: ``[0, 1, 2, 7]`` becomes "0-2, 7"."""
    runs: list[list[int]] = []
    for b in blocks:
        if runs and runs[-1][1] == b - 1:
            runs[-1][1] = b
        else:
            runs.append([b, b])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def gigabytes(n_bytes: float) -> str:
    """Returns ``n_bytes`` as text in GB; below 10 MB in MB, below 10 kB in kB, below 1 kB in bytes."""
    for unit_bytes, least_bytes, unit in ((1e9, 1e7, "GB"), (1e6, 1e4, "MB"), (1e3, 1e3, "kB")):
        if n_bytes >= least_bytes:
            return f"{n_bytes / unit_bytes:.2f} {unit}"
    return f"{n_bytes:.4g} bytes"


def largest_concurrency(problem: Problem, honour_cap: bool = True) -> int:
    """Returns the largest |R| at which CG-BP holds every block (0: none), by bisection.

    CG-BP places windows from block 0 on and leaves no gap. So all blocks are held exactly if
    ``sum m_j >= L``, and m_j decreases with |R|.
    """

    def fits(concurrency: int) -> bool:
        counts = block_counts(problem, concurrency, honour_cap=honour_cap)
        return sum(counts) >= problem.model.n_blocks

    low, high = 0, 1
    if not fits(1):
        return 0
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _more_servers(
    blocks_of: dict[str, int], n_missing: int, least: dict[str, int] | None = None
) -> list[str]:
    """Returns, per kind of hardware that can hold a block, how many more servers would hold ``n_missing``.

    ``least``: how many are needed for another reason.
    """
    offers = []
    for hardware, n_blocks in sorted(blocks_of.items(), key=lambda kind: -kind[1]):
        if n_blocks > 0:
            n = max(ceil(n_missing / n_blocks), (least or {}).get(hardware, 1))
            offers.append(f"{n} more {hardware} server{'s' if n > 1 else ''}")
    return offers


def _more_for_any_concurrency(problem: Problem) -> list[str]:
    """Returns, per kind of hardware, how many more servers an |R| that CG-BP chooses itself needs.

    With them it holds all blocks for one session, within the servers' block caps, and the memory bound is at least 1.
    """
    per_block_bytes = problem.model.block_bytes + problem.design_cache_bytes
    missing_bytes = _needed_bytes(problem) - sum(server.memory_bytes for server in problem.servers)
    least = {}
    for hardware in dict.fromkeys(s.hardware for s in problem.servers):
        memory_bytes = max(s.memory_bytes for s in problem.servers if s.hardware == hardware)
        # Every further server also adds one block and its cache to the memory that the bound needs.
        if memory_bytes > per_block_bytes:
            least[hardware] = max(ceil(missing_bytes / (memory_bytes - per_block_bytes)), 1)
    counts = block_counts(problem, 1)
    n_missing = problem.model.n_blocks - sum(counts)
    return _more_servers(_by_hardware(problem.servers, counts), n_missing, least)


def _needed_bytes(problem: Problem) -> float:
    """Returns the memory of all servers together with which the memory bound on |R| is 1."""
    per_block_bytes = problem.model.block_bytes + problem.design_cache_bytes
    return per_block_bytes * (problem.model.n_blocks + problem.n_servers)


def _by_hardware(servers: Sequence[ServerSpec], counts: Sequence[int]) -> dict[str, int]:
    """Returns how many blocks a server of each kind of hardware holds (the largest of these servers)."""
    held: dict[str, int] = {}
    for server, count in zip(servers, counts, strict=True):
        held[server.hardware] = max(held.get(server.hardware, 0), count)
    return held


def _sentence(what: str, missing: Sequence[int], problem: Problem, per_block_bytes: float) -> str:
    plural = "s" if len(missing) > 1 else ""
    are = "are" if plural else "is"
    return (
        f"{what} leaves {len(missing)} of {problem.model.n_blocks} blocks unplaced: block{plural} "
        f"{block_list(missing)} {are} on no server, because "
        f"{gigabytes(len(missing) * per_block_bytes)} of memory are missing"
    )


def _advice(offers: Sequence[str]) -> str:
    return f"; {' or '.join(offers)} would do" if offers else "; give the servers more memory"


def one_infeasible(problem: Problem, missing: Sequence[int]) -> InfeasiblePlacement:
    """Returns the error that CG-BP leaves ``missing`` on no server even for one session, so that it can choose no |R|."""
    per_block_bytes = problem.model.block_bytes + problem.design_cache_bytes
    sentence = _sentence("CG-BP for |R| = 1", missing, problem, per_block_bytes)
    return InfeasiblePlacement(sentence + _advice(_more_for_any_concurrency(problem)))


def cgbp_infeasible(
    problem: Problem, design_concurrency: int, missing: Sequence[int], honour_cap: bool
) -> InfeasiblePlacement:
    """Returns the error that CG-BP for ``design_concurrency`` sessions leaves ``missing`` on no server."""
    counts = block_counts(problem, design_concurrency, honour_cap=honour_cap)
    per_block_bytes = problem.model.block_bytes + design_concurrency * problem.design_cache_bytes
    offers = _more_servers(_by_hardware(problem.servers, counts), len(missing))
    limit = largest_concurrency(problem, honour_cap)
    if limit:
        offers.append(f"|R| <= {limit}")
    sentence = _sentence(f"CG-BP for |R| = {design_concurrency}", missing, problem, per_block_bytes)
    return InfeasiblePlacement(sentence + _advice(offers))


def petals_infeasible(problem: Problem, counts: Sequence[int], missing: Sequence[int]) -> InfeasiblePlacement:
    """Returns the error that PETALS with ``counts[j]`` blocks on server j leaves ``missing`` on no server."""
    per_block_bytes = problem.model.block_bytes + problem.model.petals_cache_bytes
    offers = _more_servers(_by_hardware(problem.servers, counts), len(missing))
    sentence = _sentence("PETALS' placement", missing, problem, per_block_bytes)
    return InfeasiblePlacement(sentence + _advice(offers))


def no_concurrency(problem: Problem, bound: int) -> InfeasiblePlacement:
    """Returns the error that the closed-form memory bound on |R| is ``bound`` < 1."""
    n_blocks, n_servers = problem.model.n_blocks, problem.n_servers
    have_bytes = sum(s.memory_bytes for s in problem.servers)
    need_bytes = _needed_bytes(problem)
    offers = _more_for_any_concurrency(problem)
    limit = largest_concurrency(problem)
    if limit:
        offers.append(f"a design concurrency given by hand, at most {limit},")
    missing = _unheld_after(problem)
    blocks = (
        f"block{'s' if len(missing) > 1 else ''} {block_list(missing)} would be on no server and "
        if missing
        else ""
    )
    return InfeasiblePlacement(
        f"no design concurrency |R| >= 1 is guaranteed to fit: {blocks}the memory bound gives "
        f"|R| <= {bound}, because {gigabytes(need_bytes - have_bytes)} of memory are missing"
        f" ({gigabytes(have_bytes)} on {n_servers} servers, {gigabytes(need_bytes)} needed for "
        f"{n_blocks} blocks)" + _advice(offers)
    )


def _unheld_after(problem: Problem) -> list[int]:
    """Returns the blocks that no server holds even with |R| = 1 (CG-BP places from block 0 on)."""
    n_held = sum(block_counts(problem, 1))
    return list(range(min(n_held, problem.model.n_blocks), problem.model.n_blocks))
