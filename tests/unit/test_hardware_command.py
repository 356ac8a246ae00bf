"""``testbed hardware`` and the models of ``testbed model``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.catalogue import gpus
from testbed.experiments.sources import Document
from testbed.inspect.hardware import errors_command, hardware_command, list_command
from testbed.inspect.model import show_command

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"


def test_the_catalogue_lists_every_gpu_with_its_source() -> None:
    answer, text = hardware_command(None, None, None)
    assert [row["name"] for row in answer["hardware"]] == list(gpus())
    assert "NVIDIA L4 data sheet" in text
    assert answer["hardware"][0]["flops"] == {"fp32": 15.7e12, "fp16": 125e12}


def test_a_model_shows_derived_times_beside_measured_ones() -> None:
    answer, text = hardware_command("l4", "llama-2-70b", None)
    [row] = answer["hardware"]
    assert row["measured"]["helix-l4"]["decode_s"] == 6.9e-3
    assert row["roofline"]["decode_s"] == pytest.approx(7.18e-3, rel=1e-3)
    assert row["fits_blocks"] == 12
    assert "measured (helix-l4)" in text


def test_as_many_blocks_fit_as_a_server_by_that_name_can_hold() -> None:
    answer, text = hardware_command("a100-40gb", "mixtral-8x7b", None)
    scenario = {
        "name": "one",
        "model": {"profile": "mixtral-8x7b"},
        "servers": [{"hardware": "a100-40gb", "site": "B"}],
        "clients": [{"site": "A"}],
        "network": {
            "kind": "clusters",
            "pairs": [{"sites": ["A", "B"], "rtt": "1 ms", "rate": "1 Gbit/s"}],
        },
        "workload": {"arrivals": "listed", "rate": 1, "requests": [[0, 1, 1]]},
        "policy": {"name": "proposed"},
    }
    problem = load_experiment(Document(scenario)).problem
    n_held = problem.model.best_blocks(problem.servers[0].memory_bytes)
    assert answer["hardware"][0]["fits_blocks"] == n_held == 12
    assert "keeps 10% of it free" in text


def test_a_measured_profile_is_found_by_its_own_name() -> None:
    answer, _ = hardware_command("mig-1g", "bloom-176b", None)
    assert answer["hardware"][0]["name"] == "a100-80gb-mig-1g"
    assert answer["hardware"][0]["measured"]["mig-1g"]["decode_s"] == 16.2488e-3


def test_a_gpu_without_the_type_says_so_beside_the_others() -> None:
    answer, text = hardware_command(None, "llama-3-8b", None)
    row = next(row for row in answer["hardware"] if row["name"] == "t4")
    assert row["roofline"] is None
    assert "t4 does not support bf16" in text


def test_models_are_shown_by_name() -> None:
    answer, text = show_command("llama-3-70b", "nf4", None)
    assert (answer["feed_forward"], answer["dtype"], answer["cache_bytes_per_token"]) == (
        28672,
        "nf4",
        4096.0,
    )
    assert "s_m 441.438 MB" in text
    assert show_command("llama-3-70b", None, None)[0]["dtype"] == "bf16"
    assert "llama-3-70b" in {row["name"] for row in list_command()[0]["models"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tee4", None, None), 'unknown hardware "tee4"; valid: '),
        ((None, "llama-9", None), 'unknown model "llama-9"'),
        (
            (None, "llama-3-8b", "fp6"),
            "--dtype fp6: choose one of fp32, fp16, bf16, int8, nf4, fp8, mxfp4, int4",
        ),
        ((None, None, "nf4"), "--dtype is of a model: name one with --model"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: tuple[str | None, ...], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        hardware_command(*arguments)


def test_a_model_that_is_neither_known_nor_a_folder_is_refused() -> None:
    with pytest.raises(UserError, match="or give a checkpoint's folder"):
        show_command("nowhere", None, None)
    with pytest.raises(UserError, match="give --dtype int8 or --dtype nf4"):
        show_command("llama-3-8b", None, "nf4")


def test_a_command_that_reads_a_scenario_often_warns_once() -> None:
    command = [sys.executable, "-m", "testbed", "simulate", "clustered", "--runs", "2"]
    done = subprocess.run(
        [*command, "--set", "model={profile='llama-3-70b'}"], capture_output=True, text=True, check=True
    )
    warned = [line for line in done.stderr.splitlines() if "was measured for" in line]
    assert [line.split('"')[1] for line in warned] == ["mig-1g", "a100"]


def test_the_document_has_the_errors_that_the_command_finds() -> None:
    rows = errors_command()[0]["errors"]
    assert {row["profile"] for row in rows if row["chosen_on"]} == {"helix-a100"}
    text = DOCUMENT.read_text(encoding="utf-8")
    for row in rows:
        numbers = f"{1e3 * row['measured_s']:.4g} | {1e3 * row['roofline_s']:.4g} | {100 * row['error_ratio']:+.0f} %"
        assert f"| {row['profile']} | {row['what']} | {numbers} |" in text
