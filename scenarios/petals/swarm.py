"""A member of a PETALS swarm on a node of the testbed's network: ``swarm.py dht | server FIRST:LAST | client``.

It runs in PETALS' own environment (``make petals``), and PETALS' own servers and client do the work. What passes
between the members goes over the emulated network; what they must know before is in ``$TESTBED_RUN/petals``:
identities, the checkpoint, and each server's process (``NAME.pid``). ``PETALS_MODEL`` names a checkpoint of BLOOM's
to serve; otherwise the first member makes one with random weights and the sizes of the scenario's ``[model]``.
docs/petals.md describes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PORT = 31338
PREFIX = "petals-real"
"""Under which the blocks of this model are announced."""
RUN = Path(os.environ["TESTBED_RUN"])
NODE = os.environ["TESTBED_NODE"]
HOME = RUN / "petals"
CHECKPOINT = HOME / "checkpoint"
"""The model in the form that PETALS reads; it appears when it is whole."""
FIRST = "petals-dht"

_WAIT_S = 120.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "BITSANDBYTES_NOWELCOME": "1"}
_THREADS = {"OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("dht", help="the first peer, which the others are told of; it also makes the checkpoint")
    server = roles.add_parser("server", help="a PETALS server")
    server.add_argument("blocks", help="FIRST:LAST, the last not included")
    client = roles.add_parser("client", help="generate greedily, and note when each token came")
    client.add_argument("--input", type=int, nargs="+", default=[8], help="tokens of each request's prompt")
    client.add_argument("--output", type=int, default=64, help="tokens to generate per request")
    client.add_argument("--replay", choices=("as-is", "mended"), default="as-is", help="see docs/petals.md")
    given = parser.parse_args()
    os.environ.update(_OFFLINE | _THREADS, PETALS_CACHE=str(HOME / "cache"))
    HOME.mkdir(exist_ok=True)
    # torch leaves files there when it is killed. Mounts of the testbed's programs are their own, and end with them.
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
    warnings.filterwarnings("ignore")
    patch()
    if given.role == "dht":
        dht()
    elif given.role == "server":
        serve(given.blocks)
    else:
        generate(given.input, given.output, given.replay == "mended")


def patch() -> None:
    """Make PETALS 2.2 run with hivemind 1.1.12 and without the Internet. What it computes and sends stays its own."""
    import hivemind.compression.serialization
    import hivemind.p2p
    import hivemind.utils.asyncio
    import hivemind.utils.logging
    import hivemind.utils.nested
    import hivemind.utils.serializer
    import hivemind.utils.streaming
    import hivemind.utils.tensor_descr
    import hivemind.utils.timed_storage

    # Names that this version has, but no longer where PETALS looks for them.
    for module in [module for name, module in sys.modules.items() if name.startswith("hivemind.")]:
        for key, value in vars(module).items():
            if not key.startswith("_"):
                vars(hivemind).setdefault(key, value)
                vars(hivemind.utils).setdefault(key, value)
    import petals.server.reachability
    import petals.utils.version

    petals.utils.version.validate_version = lambda: None  # asks the Internet for newer versions
    petals.server.reachability.check_direct_reachability = lambda *_, **__: (
        None
    )  # asks public peers to call back


def dht() -> None:
    """The first peer. Its identity is written before it begins, so that others can name it."""
    from hivemind.p2p import P2P

    P2P.generate_identity(str(HOME / "new.id"))
    (HOME / "new.id").rename(_identity(FIRST))
    _make_checkpoint()
    from petals.cli import run_dht

    sys.argv = ["run_dht", *_peer()]
    run_dht.main()


def serve(blocks: str) -> None:
    """A PETALS server with ``blocks``, which ends with its process group."""
    (HOME / f"{NODE}.pid").write_text(f"{os.getpid()}\n")
    _wait_for(CHECKPOINT)
    sizes = json.loads((CHECKPOINT / "config.json").read_text())
    from petals.cli import run_server

    sys.argv = [
        *("run_server", str(CHECKPOINT), "--initial_peers", _first_peer(), *_peer()),
        *("--block_indices", blocks, "--balance_quality", "0", "--dht_prefix", PREFIX),
        *("--torch_dtype", sizes["torch_dtype"], "--device", "cpu", "--attn_cache_tokens", "4096"),
        *("--num_handlers", "1", "--throughput", "1", "--no_auto_relay", "--skip_reachability_check"),
    ]
    run_server.main()


def generate(n_inputs: list[int], n_output: int, is_mended: bool) -> None:
    """Generate ``n_output`` tokens through the swarm for one prompt after another, each of its number of tokens.

    ``client.jsonl`` has a line for each token. Times are seconds of this machine's monotonic clock. The last line
    says for how many requests transformers, which computes the same checkpoint here, gives other tokens.
    """
    import torch

    _wait_for(CHECKPOINT)
    model = _swarm_model()
    if is_mended:
        _mend_replay()
    numbers = torch.arange(max(n_inputs))
    prompts = [((7 * numbers[:n] + n) % model.config.vocab_size).unsqueeze(0) for n in n_inputs]
    settings = {"max_new_tokens": n_output, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with (HOME / "client.jsonl").open("w", buffering=1) as file:
        log = _Log(file)
        answers = []
        for index, prompt in enumerate(prompts):
            log.begin(index, prompt.shape[1])
            answers.append(model.generate(prompt, streamer=log, **settings))
        log.write("generated")
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        pairs = zip(prompts, answers, strict=True)
        n_other = sum(not torch.equal(whole.generate(p, **settings), answer) for p, answer in pairs)
        log.write("ended", n_requests=len(prompts), n_with_other_tokens=n_other)


class _Log:
    """What PETALS' ``generate`` calls with the prompt and then with every token: a line of JSON for each."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._request = 0
        self._is_prompt = True

    def begin(self, request: int, n_input: int) -> None:
        self._request = request
        self._is_prompt = True
        self.write("begun", request=request, n_input=n_input)

    def put(self, tokens: Any) -> None:
        if not self._is_prompt:
            self.write("token", request=self._request, token_id=int(tokens.flatten()[-1]))
        self._is_prompt = False

    def write(self, event: str, **more: int) -> None:
        self._file.write(json.dumps({"event": event, "at_s": time.monotonic(), **more}) + "\n")

    def end(self) -> None:
        """Nothing is left to write."""


def _swarm_model() -> Any:
    """PETALS' model, once every block has a server that is online."""
    import torch
    from petals import AutoDistributedModelForCausalLM
    from petals.data_structures import ServerState
    from petals.utils.dht import get_remote_module_infos

    model = AutoDistributedModelForCausalLM.from_pretrained(
        str(CHECKPOINT),
        initial_peers=[_first_peer()],
        dht_prefix=PREFIX,
        torch_dtype=getattr(torch, json.loads((CHECKPOINT / "config.json").read_text())["torch_dtype"]),
    )
    manager = model.transformer.h.sequence_manager
    until = time.monotonic() + _WAIT_S
    while True:
        blocks = get_remote_module_infos(manager.dht, manager.block_uids, latest=True)
        if all(any(s.state is ServerState.ONLINE for s in block.servers.values()) for block in blocks):
            return model
        if time.monotonic() > until:
            sys.exit(f"after {_WAIT_S:g} s some blocks have no server; see the servers' logs")
        time.sleep(0.5)


def _mend_replay() -> None:
    """Give a replacement's session its position. PETALS 2.2 leaves it at 0 and then refuses its own replay (#587)."""
    from petals.client.inference_session import InferenceSession

    update = InferenceSession._update_sequence

    def mended(session: Any, server_idx: int, *others: Any) -> None:
        update(session, server_idx, *others)
        new = session._server_sessions[server_idx]
        if new.history is not None:
            new._position = session._position

    InferenceSession._update_sequence = mended


def _make_checkpoint() -> None:
    """Write ``CHECKPOINT``: weights named as PETALS looks for them, and the type of their values in the config."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import BloomConfig, BloomForCausalLM

    making = HOME / "making"
    making.mkdir()
    if given := os.environ.get("PETALS_MODEL"):
        files = sorted(Path(given).glob("*.safetensors"))
        weights = {name: value for file in files for name, value in load_file(file).items()}
        config = json.loads((Path(given) / "config.json").read_text())
        for file in Path(given).glob("*token*.json"):
            shutil.copy(file, making)
    else:
        sizes = tomllib.loads((RUN / "scenario.toml").read_text())["model"]
        torch.manual_seed(sizes["seed"])
        config = BloomConfig(
            hidden_size=sizes["hidden_size"],
            n_layer=sizes["n_blocks"],
            n_head=sizes["heads"],
            vocab_size=sizes["vocab"],
            architectures=["BloomForCausalLM"],
        )
        model = BloomForCausalLM(config)
        for name, weight in model.named_parameters():  # small weights would say one token for ever
            if weight.dim() == 2:
                weight.data.normal_(std=1.0 if "embed" in name else 2.0 / weight.shape[1] ** 0.5)
            elif "embed" in name:
                weight.data.mul_(0.2)
        weights, config = model.state_dict(), config.to_dict()
    stripped = {name.removeprefix("transformer."): value.contiguous() for name, value in weights.items()}
    stripped.pop("lm_head.weight", None)  # BLOOM's is the table of its embeddings
    save_file(stripped, making / "model.safetensors", metadata={"format": "pt"})
    config["torch_dtype"] = config.pop("dtype", None) or config.get("torch_dtype") or "float32"
    (making / "config.json").write_text(json.dumps(config, indent=1))
    making.rename(CHECKPOINT)


def _identity(node: str) -> Path:
    return HOME / f"{node}.id"


def _peer() -> tuple[str, ...]:
    """Options of a peer: where it listens, and the file of its identity."""
    return "--host_maddrs", f"/ip4/{_address(NODE)}/tcp/{PORT}", "--identity_path", str(_identity(NODE))


def _first_peer() -> str:
    """The first peer's address, once it can be reached: a member that finds nobody there ends."""
    from hivemind.p2p import PeerID

    _wait_for(_identity(FIRST))
    _until(_is_reached, f"{FIRST} was not reached")
    number = PeerID.from_identity(_identity(FIRST).read_bytes()).to_base58()
    return f"/ip4/{_address(FIRST)}/tcp/{PORT}/p2p/{number}"


def _address(node: str) -> str:
    lines = (line.split() for line in (RUN / "hosts").read_text().splitlines())
    return next(words[0] for words in lines if node in words[1:])


def _is_reached() -> bool:
    try:
        socket.create_connection((_address(FIRST), PORT), timeout=_WAIT_S).close()
    except OSError:
        return False
    return True


def _wait_for(path: Path) -> None:
    _until(path.exists, f"{path} did not appear")


def _until(is_so: Callable[[], bool], else_said: str) -> None:
    """Wait until something is so; ends this process after ``_WAIT_S``, with what is said then."""
    until = time.monotonic() + _WAIT_S
    while not is_so():
        if time.monotonic() > until:
            sys.exit(f"{else_said} within {_WAIT_S:g} s; see logs/{FIRST}.log")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
