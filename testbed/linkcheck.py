"""``testbed links``: measures the emulated network itself, before any session."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from nodes import control
from nodes.node import DATA_PORT, NodeConfig
from nodes.probe import ProbePlan
from testbed import wiring
from testbed.errors import RunError
from testbed.experiment import Experiment
from testbed.handle import LauncherHandle
from testbed.rundir import LINKS_PREFIX, claim

_BULK_S = 0.5
_MIN_BULK_BYTES = 200_000
_MAX_BULK_BYTES = 64_000_000


def links_command(experiment: Experiment, pairs: int | None, echoes: int) -> tuple[dict[str, Any], str]:
    """Measure the first ``pairs`` client-server pairs (all by default); answers (JSON object, text)."""
    with tempfile.TemporaryDirectory(prefix=LINKS_PREFIX) as folder:
        run_dir = Path(folder)
        claim(run_dir)
        (run_dir / "logs").mkdir()
        answer = uvloop.run(_Links(experiment, run_dir).measure(pairs, echoes))
    return answer, _text(answer)


class _Links:
    def __init__(self, experiment: Experiment, run_dir: Path) -> None:
        self._experiment = experiment
        self._run_dir = run_dir
        self._launcher = LauncherHandle(run_dir)
        self._peers: dict[str, control.Peer] = {}
        self._ports: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._dead: str | None = None

    async def measure(self, pairs: int | None, echoes: int) -> dict[str, Any]:
        experiment, problem = self._experiment, self._experiment.problem
        self._launcher.listen(self._ended)
        path = self._run_dir / "control.sock"
        listener = await control.listen(path, self._accept)
        try:
            spec = wiring.network_spec(experiment, self._run_dir.name)
            logs = self._run_dir / "logs"
            network = await self._launcher.ask(
                "open", experiment.network, spec, logs, experiment.keep_cpus_awake
            )
            wanted = [(c, s.name) for c in problem.clients for s in problem.servers][:pairs]
            names = [(c, "prober") for c in problem.clients] + [(s.name, "echo") for s in problem.servers]
            for name, kind in names:
                port = 0 if network["delays_in_client"] or kind == "prober" else DATA_PORT
                config = NodeConfig(name, path, network["addresses"][name], port, 1.0)
                await self._launcher.ask("spawn", kind, config, logs / f"{name}.log")
            await self._all_connected(len(names))
            rows = []
            for client, server in wanted:
                rows += await self._measure_pair(network, client, server, echoes)
        finally:
            listener.close()
            self._launcher.close()
        return {
            "scenario": experiment.name,
            "network": network["name"],
            "why": network["why"],
            "time_scale": experiment.time_scale,
            "echo_bytes": problem.model.token_bytes,
            "pairs": rows,
        }

    async def _all_connected(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self._peers) < count:
                if self._dead is not None:
                    raise RunError(self._dead)
                self._changed.clear()
                await self._changed.wait()

    async def _measure_pair(
        self, network: dict[str, Any], client: str, server: str, echoes: int
    ) -> list[dict[str, Any]]:
        """Both directions of a pair; times scaled back to scenario time."""
        experiment = self._experiment
        scale, mtu = experiment.time_scale, experiment.mtu
        token_bytes = experiment.problem.model.token_bytes
        up = wiring.scaled(experiment.links[client, server], scale)
        down = wiring.scaled(experiment.links[server, client], scale)
        bulk_up, bulk_down = (
            int(min(max(link.rate_bps / 8 * _BULK_S, _MIN_BULK_BYTES), _MAX_BULK_BYTES))
            for link in (up, down)
        )
        delays: dict[str, tuple[float, float] | None] = {"up": None, "down": None}
        if network["delays_in_client"]:
            for key, link in (("up", up), ("down", down)):
                delays[key] = (link.delay_s, link.transmission_s(1_000_000, mtu) / 1_000_000)
        plan = ProbePlan(
            address=network["addresses"][server],
            port=self._ports[server],
            n_echoes=echoes,
            echo_bytes=token_bytes,
            bulk_bytes_up=bulk_up,
            bulk_bytes_down=bulk_down,
            **delays,
        )
        try:
            result = await self._peers[client].ask("measure", asdict(plan))
        except control.ControlError as error:
            raise RunError(f"{client} could not measure {server}: {error}{self._tail(client)}") from error
        rtt_s = (up.delay_s + down.delay_s) * scale
        rtt = np.array(result["rtt_s"]) * scale
        echo = np.array(result["echo_s"]) * scale
        wire_s = (up.transmission_s(token_bytes, mtu) + down.transmission_s(token_bytes, mtu)) * scale
        rows = []
        for source, target, link, n_bytes, took in (
            (client, server, up, bulk_up, result["up_s"]),
            (server, client, down, bulk_down, result["down_s"]),
        ):
            # The transfer's last byte arrives one propagation there and the answer one back after the first.
            sending_s = max(took - up.delay_s - down.delay_s, 1e-9)
            wire_bits = link.transmission_s(n_bytes, mtu) * link.rate_bps
            rows.append(
                {
                    "from": source,
                    "to": target,
                    "rtt_ms": _milliseconds(rtt_s, rtt),
                    "echo_ms": _milliseconds(rtt_s + wire_s, echo),
                    "rate_mbps": {
                        "requested": link.rate_bps / scale / 1e6,
                        "achieved": wire_bits / sending_s / scale / 1e6,
                        "goodput": n_bytes * 8 / sending_s / scale / 1e6,
                    },
                }
            )
        return rows

    def _tail(self, name: str) -> str:
        text = (self._run_dir / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return ": " + " | ".join(text.splitlines()[-3:]) if text else ""

    async def _accept(self, peer: control.Peer) -> None:
        async def hello(name: str, pid: int, port: int) -> None:
            self._peers[name], self._ports[name] = peer, port
            self._changed.set()

        peer.handlers["hello"] = hello
        await peer.serve()

    def _ended(self, name: str, status: int) -> None:
        self._dead = f"{name} ended unexpectedly (status {status}){self._tail(name)}"
        self._changed.set()


def _milliseconds(requested_s: float, measured_s: Any) -> dict[str, float]:
    p50, p99 = np.percentile(measured_s, (50, 99)) * 1e3
    requested = requested_s * 1e3
    return {
        "requested": requested,
        "p50": float(p50),
        "p99": float(p99),
        "error_p50": float(p50) - requested,
        "error_p99": float(p99) - requested,
    }


def _text(answer: dict[str, Any]) -> str:
    lines = [
        f"network {answer['network']} ({answer['why']}), time scale {answer['time_scale']:g}",
        f"RTT of one byte, echo of {answer['echo_bytes']} bytes each way, rate with headers",
        "",
        f"{'from':<12} {'to':<12} {'RTT asked':>10} {'p50':>9} {'p99':>9}  {'echo asked':>10} {'p50':>9} {'p99':>9}"
        f"  {'Mbit/s asked':>12} {'achieved':>9} {'error':>7}",
    ]
    for row in answer["pairs"]:
        rtt, echo, rate = row["rtt_ms"], row["echo_ms"], row["rate_mbps"]
        error = 100 * (rate["achieved"] / rate["requested"] - 1)
        lines.append(
            f"{row['from']:<12} {row['to']:<12} {rtt['requested']:>10.3f} {rtt['p50']:>9.3f} {rtt['p99']:>9.3f}  "
            f"{echo['requested']:>10.3f} {echo['p50']:>9.3f} {echo['p99']:>9.3f}  "
            f"{rate['requested']:>12.1f} {rate['achieved']:>9.1f} {error:>6.1f}%"
        )
    return "\n".join(lines)
