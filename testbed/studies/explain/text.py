"""The output of ``testbed explain`` on the terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.table import Table

from testbed.experiments.units import counted
from testbed.studies.explain.account import OF_HOPS, PARTS
from testbed.terminal import console_to

_LABELS = {
    "queue_s": "waiting for room",
    "setup_s": "session setup",
    "setup_wait_s": "openings waiting for links",
    "propagation_s": "propagation",
    "transmission_s": "transmission",
    "link_wait_s": "waiting for links",
    "network_rest_s": "network, other",
    "compute_alone_s": "compute, alone",
    "compute_shared_s": "compute, with others",
    "compute_slower_s": "slower than the profile",
    "halted_s": "server halted",
    "behind_s": "behind its own rounds",
    "client_s": "client",
    "ahead_s": "sent ahead",
    "replays_s": "replays after failures",
    "preempted_s": "preempted",
    "rest_s": "rest",
}
LEAST_S = 5e-4
"""Parts smaller than this are not shown."""


def explain_text(answer: dict[str, Any], width: int = 160) -> str:
    """Returns the text: the parts and their shares, the hops, and the best chain in hindsight."""
    buffer = io.StringIO()
    console = console_to(buffer, width)
    e2e_s = answer["e2e_s"]
    console.print(
        f"request {answer['request']} of {answer['client']} took {e2e_s:.3f} s, "
        f"the first token {answer['ttft_s']:.3f} s "
        f"({counted(answer['n_input_tokens'], 'tokens')} in, {answer['n_output_tokens']:,} out, "
        f"{counted(answer['n_attempts'], 'attempts')})"
    )
    if "n_rounds" in answer:
        console.print(
            f"its tokens after the first came in {counted(answer['n_rounds'], 'rounds')}: "
            f"{counted(answer['n_accepted'], 'drafted tokens')} agreed"
        )
    kept_s = answer.get("saved_by_caches_s", 0.0)
    if "n_cached_tokens" in answer:
        console.print(
            f"{counted(answer['n_cached_tokens'], 'tokens')} of its prompt were kept there: that saved {kept_s:.3f} s"
        )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in PARTS:
        value_s = answer["parts"][name]
        if abs(value_s) >= LEAST_S:
            table.add_row(_LABELS[name], f"{_in_ms(value_s)} s", f"{value_s / e2e_s:.1%}")
    console.print(table)
    hops = Table(box=None, pad_edge=False, header_style="bold")
    shown = [name for name in OF_HOPS if any(abs(hop[name]) >= LEAST_S for hop in answer["hops"])]
    hops.add_column("hop", no_wrap=True)
    steps = "steps" if "n_rounds" in answer else "tokens"
    for name in ("blocks", steps, *(_LABELS[name] for name in shown)):
        hops.add_column(name, justify="right")
    for hop in answer["hops"]:
        cells = [_in_ms(hop[name]) for name in shown]
        blocks = f"{hop['first_block']}-{hop['last_block'] - 1}"
        hops.add_row(hop["server"], blocks, str(hop["n_tokens"]), *cells)
    console.print(hops)
    for loss in answer["losses"]:
        then = (
            "never went on" if loss["on_again_at_s"] is None else f"went on at {loss['on_again_at_s']:.3f} s"
        )
        console.print(f"it lost {', '.join(loss['servers'])} at {loss['at_s']:.3f} s, and {then}")
    own, best = answer["own_chain_alone"], answer["best_chain_alone"]
    its = "its first chain" if answer["losses"] else "its chain"
    down = ", ".join(answer["down_meanwhile"])
    without = f" without {down}, down meanwhile," if down else ""
    others_s, machine_s, twin_s = (
        answer[f"{name}_s"] for name in ("lost_to_others", "lost_to_machine", "twin_e2e")
    )
    if machine_s and not others_s:
        lost_s = machine_s
        due = f"due to frames{' and this machine' if answer['in_real_time'] else ''}: no other request was there"
    else:
        lost_s = others_s
        due = "due to others"
        due += " and to links that changed" if answer["links_changed"] else ""
        due += " and to failures" if answer["losses"] or answer["down_meanwhile"] else ""
        if twin_s is not None:
            due += f", {_in_ms(machine_s)} s to this machine (its twin took {twin_s:.3f} s)"
    parts = answer["twin_parts"] or answer["parts"]
    slower_s = parts["compute_slower_s"]
    slower = f", {slower_s:.3f} s to servers slower than their profile" if abs(slower_s) >= LEAST_S else ""
    halted_s = parts["halted_s"]
    if halted_s >= LEAST_S:
        slower += f", {halted_s:.3f} s to halted servers"
    flight_s = parts["behind_s"] + parts["ahead_s"]
    if abs(flight_s) >= LEAST_S:
        slower += f", {flight_s:.3f} s to several rounds in flight"
    kept = " with what was kept" if kept_s else ""
    console.print(
        f"alone on {its}{kept}: {own['e2e_s'] - kept_s:.3f} s; {_in_ms(lost_s)} s are {due}{slower}"
    )
    if best is None:
        holds = "holds all blocks and has room" if down else "has room"
        console.print(f"no chain of the placement{without} {holds} for it")
    elif best["e2e_s"] >= own["e2e_s"] - kept_s:
        console.print(f"no chain{without} would have been faster on idle servers")
    else:
        chain = ", ".join(f"{h['server']} {h['first_block']}-{h['last_block'] - 1}" for h in best["hops"])
        console.print(
            f"best chain in hindsight{without.removesuffix(',')}: {best['e2e_s']:.3f} s on idle servers, "
            f"{answer['lost_to_chain_s']:.3f} s less ({chain})"
        )
    return buffer.getvalue().rstrip()


def _in_ms(value_s: float) -> str:
    """Returns seconds to the millisecond, without a minus sign for what rounding leaves."""
    return f"{round(value_s, 3) + 0.0:.3f}"
