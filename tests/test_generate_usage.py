"""``shipway generate``: what it refuses, in one line, and before what."""

import shutil
from pathlib import Path

import pytest

from command_line import Fakes, Run, assert_one_line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", "a", "--prompt-file", "b"], "either --prompt"),
        ([], "either --prompt"),
        (["--prompt-file", "no/such/file"], "cannot read no/such/file"),
        (["--prompt", "a", "--route", "no-such"], "no route is called 'no-such'"),
        (["--prompt", "a", "--route", ""], "no route is called ''"),
        (["--prompt", "a", "--model", "no-such-model"], "no-such-model"),
        (["--prompt", "a", "--max-new", "0"], "max-new"),
        (["--prompt", "a", "--greedy", "--temperature", "1"], "exclude each other"),
        (["--prompt", "a", "--top-k", "4"], "temperature"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "2"], "top-p"),
        (["--prompt", "a", "--stop", ""], "non-empty"),
        (["--prompt", "a", "--threads", "100000"], "threads"),
        (["--prompt", "a", "--json", "no/such/folder/g.json"], "no folder"),
        (
            ["--model", "no-such-model", "--prompt", "a", "--json", "/"],
            "it is a folder",
        ),  # before the model is looked at
    ],
)
def test_usage_errors_are_one_line(run: Run, checkpoint: str, arguments: list[str], part: str) -> None:
    model = [] if "--model" in arguments else ["--model", checkpoint]
    route = [] if "--route" in arguments else ["--route", "torch-eager"]
    code, _, err = run("generate", *model, *route, *arguments)
    assert_one_line(code, 2, err, part)


@pytest.mark.parametrize("route", ["Good", "all"])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--greedy", "--temperature", "1"], "exclude each other"),
        (["--max-new", "0"], "max-new"),
        (["--max-new", "1000"], "context of 256"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "1", "--top-p", "0"], "top-p"),
        (["--temperature", "1", "--top-k", "-1"], "top-k"),
        (["--seed", "-1"], "seed"),
        (["--stop", ""], "non-empty"),
        (["--stop", "\udcff"], "Unicode"),
        (["--prompt", "\udcff\udcfe"], "the prompt is not Unicode text"),
        (["--threads", "0"], "threads"),
        (["--dtype", "f8"], "dtype 'f8'"),
        (["--dtype", ""], "dtype ''"),
        (["--weights", ""], "weight format ''"),
        (["--dtype", "f16"], "dtype 'f16'"),
        (["--weights", "q4"], "weight format 'q4'"),
        (["--device", "tpu"], "device is called 'tpu'"),
        (["--model", ""], "name is empty"),
        (["--chat"], "no chat template"),
    ],
)
def test_usage_errors_are_found_before_any_route_is_loaded(
    run: Run, fakes: Fakes, own_cache: Path, tmp_path: Path,
    checkpoint: str, route: str, arguments: list[str], part: str,
) -> None:  # fmt: skip
    fakes("Good", "Slow")
    if arguments == ["--chat"]:
        checkpoint = str(shutil.copytree(checkpoint, tmp_path / "plain"))
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            Path(checkpoint, name).unlink(missing_ok=True)
    code, _, err = run("generate", "--model", checkpoint, "--prompt", "a", "--route", route, *arguments)
    assert_one_line(code, 2, err, part)
    assert not (own_cache / "logs").exists()  # no worker was started


def test_context_overflow_is_found_before_anything_is_loaded(run: Run, checkpoint: str, own_cache: Path) -> None:
    options = ("--threads", 1, "--route", "torch-eager", "--prompt", "a" * 40, "--max-new", 250)
    code, _, err = run("generate", "--model", checkpoint, *options)
    assert_one_line(code, 2, err, "250 new", "context of 256")
    assert not (own_cache / "logs").exists()  # no worker was started


def test_prompt_file_that_is_not_text_is_refused(run: Run, checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "p.bin").write_bytes(b"ab\xff\xfe")
    code, _, err = run("generate", "--threads", 1, "--model", checkpoint, "--prompt-file", tmp_path / "p.bin")
    assert_one_line(code, 2, err, "byte 2 is 0xff")


@pytest.mark.parametrize("route", ["Good", "all"])
def test_device_of_another_machine_is_no_usage_error(run: Run, checkpoint: str, fakes: Fakes, route: str) -> None:
    fakes("Good")
    code, out, err = run("generate", "--model", checkpoint, "--prompt", "a", "--route", route, "--device", "cuda")
    assert code == 3
    assert "not on cuda" in out + err
