"""``testbed serve`` with programs that others wrote: what they see agrees with the run's own record."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import PATIENCE_S, require, rows_of, wait_until
from tests.support.serving import Serving, serving

OPTIONS = ("--network", "loopback", "--time-scale", "20", "--no-report", "--no-twin")
MODEL = "bloom-176b"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "run", "clustered", *OPTIONS) as testbed:
        yield testbed


def test_openais_own_client_streams_asks_and_lists(served: Serving) -> None:
    import openai  # here: it takes a second, and every worker imports every file

    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        sent_at = time.monotonic()
        came_at, n_tokens = [], 0
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How slow is it?"}],
            max_completion_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                came_at.append(time.monotonic())
            else:
                assert chunk.usage is not None
                n_tokens = chunk.usage.completion_tokens
        assert len(came_at) == n_tokens == 12
        whole = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 4
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            client.completions.create(model="gpt", prompt="Hello")
        with pytest.raises(openai.BadRequestError, match="n is not supported here"):
            client.completions.create(model=MODEL, prompt="Hello", n=2)
    served.end()
    first, second = rows_of(served.run_dir / "requests.parquet")
    assert (first["n_tokens_done"], second["n_tokens_done"]) == (12, 4)
    # Whoever asks sees no less than the run took, in real seconds.
    assert came_at[0] - sent_at >= first["ttft_s"] / 20
    assert came_at[-1] - sent_at >= first["e2e_s"] / 20


def test_hey_loads_it(served: Serving) -> None:
    require("hey", None if shutil.which("hey") else "the program is not installed (Debian: hey)")
    body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 3})
    command = ["hey", "-n", "12", "-c", "4", "-m", "POST", "-T", "application/json", "-d", body]
    done = subprocess.run(
        [*command, f"{served.url}/completions"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "[200]\t12 responses" in done.stdout
    served.end()
    assert [row["status"] for row in rows_of(served.run_dir / "requests.parquet")] == ["completed"] * 12


def test_prometheus_scrapes_it(served: Serving, tmp_path: Path) -> None:
    require("prometheus", None if shutil.which("prometheus") else "the program is not installed")
    assert served.ask("/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 3}).status == 200
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    target = ":".join(map(str, served.address))
    config.write_text(
        "scrape_configs:\n- job_name: testbed\n  scrape_interval: 1s\n"
        f"  static_configs: [{{targets: ['{target}']}}]\n",
        encoding="utf-8",
    )
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    with (
        open(tmp_path / "prometheus.log", "wb") as log,
        subprocess.Popen(
            [*command, f"--storage.tsdb.path={tmp_path / 'tsdb'}"], stdout=log, stderr=log
        ) as process,
    ):
        try:
            beside = Serving(process, f"http://127.0.0.1:{port}/v1", tmp_path)  # type: ignore[arg-type]
            query = "/api/v1/query?query=vllm:generation_tokens_total"
            wait_until(lambda: _value(beside, query) == "3", "the tokens to be scraped")
            assert _value(beside, "/api/v1/query?query=up") == "1"
        finally:
            process.terminate()


def _value(prometheus: Serving, query: str) -> str | None:
    try:
        found = prometheus.ask(query).json["data"]["result"]
    except (OSError, ValueError):  # it is not up yet
        return None
    return str(found[0]["value"][1]) if found else None
