import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_routes
import tiny_checkpoints
from shipway.cli import doctor
from shipway.cli.main import main
from shipway.routes.catalogue import ROUTES

TESTS = Path(__file__).parent
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoints.make("llama3", tmp_path_factory.mktemp("llama3")))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return tmp_path / "cache"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shipway", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the catalogue by fake routes of the given classes."""

    def use(*names: str) -> None:
        for name in list(ROUTES):
            monkeypatch.delitem(ROUTES, name)
        for name in names:
            monkeypatch.setitem(ROUTES, name, dataclasses.replace(fake_routes.info(name), name=name))

    return use


def assert_one_line(code: int, expected: int, err: str, *parts: str) -> None:
    assert code == expected, err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("command", ["bench", "generate", "inspect", "routes", "doctor", "report"])
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--help" in out


def test_help_shows_every_default(run: Run) -> None:
    for command, defaults in {
        "bench": ["SmolLM2-135M-Instruct", "torch-eager", "f32,bf16", "128", "64", "default: 5", "cpu"],
        "generate": ["SmolLM2-135M-Instruct", "default: (mojo-graph)", "default: 128", "default: 0.0", "default: 1.0"],
    }.items():
        _, out, _ = run(command, "--help")
        for default in defaults:
            assert default in out


def test_generate_streams_text_and_records_it(run: Run, checkpoint: str, tmp_path: Path) -> None:
    code, out, _ = run(
        "generate", "--threads", 1, "--model", checkpoint, "--route", "torch-eager",
        "--prompt", "The end", "--max-new", 6, "--greedy", "--json", tmp_path / "g.json",
    )  # fmt: skip
    assert code == 0
    document = json.loads((tmp_path / "g.json").read_text())
    assert document["schema_version"] == 1
    assert document["routes"][0]["text"] + "\n" == out
    assert 1 <= len(document["routes"][0]["ids"]) <= 6
    assert document["same_ids"] is None
    assert document["environment"]["packages"]["torch"]


def test_generate_reads_a_file_or_standard_input(run: Run, checkpoint: str, tmp_path: Path) -> None:
    common = ["generate", "--threads", "1", "--model", checkpoint, "--route", "torch-eager", "--max-new", 5]
    (tmp_path / "p.txt").write_text("The end")
    _, expected, _ = run(*common, "--prompt", "The end")
    _, out, _ = run(*common, "--prompt-file", tmp_path / "p.txt")
    assert out == expected
    done = subprocess.run(
        [sys.executable, "-m", "shipway.cli", *map(str, common), "--prompt-file", "-"],
        input="The end", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == expected


def test_chat_goes_through_the_template(run: Run, checkpoint: str, tmp_path: Path) -> None:
    common = [
        "generate",
        "--threads",
        "1",
        "--model",
        checkpoint,
        "--route",
        "torch-eager",
        "--max-new",
        1,
        "--prompt",
        "hello",
    ]
    run(*common, "--json", tmp_path / "plain.json")
    run(*common, "--chat", "--json", tmp_path / "chat.json")
    plain, chat = (json.loads((tmp_path / name).read_text())["prompt_ids"] for name in ("plain.json", "chat.json"))
    assert len(chat) > len(plain)


def test_sampling_repeats_with_its_seed(run: Run, checkpoint: str) -> None:
    def sample(seed: int) -> str:
        return run(
            "generate", "--threads", 1, "--model", checkpoint, "--route", "torch-eager", "--prompt", "a",
            "--max-new", 20, "--temperature", 1.5, "--top-p", 0.99, "--seed", seed,
        )[1]  # fmt: skip

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_all_routes_are_compared(run: Run, checkpoint: str, fakes: Callable[..., None], tmp_path: Path) -> None:
    fakes("Good", "Slow")
    code, out, _ = run(
        "generate",
        "--threads",
        1,
        "--model",
        checkpoint,
        "--prompt",
        "a",
        "--max-new",
        5,
        "--route",
        "all",
        "--json",
        tmp_path / "g.json",
    )
    assert code == 0
    assert "same 5 ids from Good, Slow" in out
    document = json.loads((tmp_path / "g.json").read_text())
    assert document["same_ids"] is True
    assert document["divergence"] is None


def test_first_divergent_token_comes_with_the_margin_of_each_route(
    run: Run, checkpoint: str, fakes: Callable[..., None], tmp_path: Path
) -> None:
    fakes("Good", "Wanders")
    code, out, _ = run(
        "generate",
        "--threads",
        1,
        "--model",
        checkpoint,
        "--prompt",
        "a",
        "--max-new",
        5,
        "--route",
        "all",
        "--json",
        tmp_path / "g.json",
    )
    assert code == 0
    assert "first divergent token: new token 3" in out
    document = json.loads((tmp_path / "g.json").read_text())
    assert document["same_ids"] is False
    divergence = document["divergence"]
    assert divergence["index"] == 2
    good, wanders = (record["ids"] for record in document["routes"])
    assert good[:2] == wanders[:2]
    for name, ids in (("Good", good), ("Wanders", wanders)):
        side = divergence["routes"][name]
        assert side["id"] == ids[2] == side["top_2"]["ids"][0]  # the margin is that of the very token that was chosen
        assert side["top_2"]["margin"] == pytest.approx(np.subtract(*side["top_2"]["logits"]))
    assert divergence["routes"]["Wanders"]["top_2"]["margin"] == 0.5


def test_failed_and_absent_routes_do_not_hide_the_others(
    run: Run, checkpoint: str, fakes: Callable[..., None], tmp_path: Path
) -> None:
    fakes("Good", "Segfaults", "Lacks")
    code, out, _ = run(
        "generate",
        "--threads",
        1,
        "--model",
        checkpoint,
        "--prompt",
        "a",
        "--max-new",
        5,
        "--route",
        "all",
        "--json",
        tmp_path / "g.json",
    )
    assert code == 1
    records = {record["route"]: record for record in json.loads((tmp_path / "g.json").read_text())["routes"]}
    assert [records[name]["status"] for name in ("Good", "Segfaults", "Lacks")] == ["ok", "failed", "not run"]
    assert "SIGSEGV" in records["Segfaults"]["reason"]
    assert "not run: needs a GPU: plug one in" in out


def test_route_that_breaks_is_one_line(run: Run, checkpoint: str, fakes: Callable[..., None]) -> None:
    fakes("Segfaults")
    code, _, err = run("generate", "--threads", 1, "--model", checkpoint, "--prompt", "a", "--route", "Segfaults")
    assert_one_line(code, 1, err, "SIGSEGV", "log: ")


def test_route_that_cannot_run_here_exits_with_3(
    run: Run, checkpoint: str, fakes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes("Lacks")
    takes_f16 = dataclasses.replace(fake_routes.info("Good"), weight_formats=("f16",))
    monkeypatch.setitem(ROUTES, "Good", takes_f16)  # one that no route takes would be a usage error
    code, _, err = run("generate", "--threads", 1, "--model", checkpoint, "--prompt", "a", "--route", "Lacks")
    assert_one_line(code, 3, err, "plug one in")
    code, _, err = run(
        "generate", "--threads", 1, "--model", checkpoint, "--prompt", "a", "--route", "Lacks", "--weights", "f16"
    )
    assert_one_line(code, 3, err, "--weights")


def test_context_overflow_is_found_before_anything_is_loaded(run: Run, checkpoint: str, own_cache: Path) -> None:
    code, _, err = run(
        "generate",
        "--threads",
        1,
        "--model",
        checkpoint,
        "--route",
        "torch-eager",
        "--prompt",
        "a" * 40,
        "--max-new",
        250,
    )
    assert_one_line(code, 2, err, "250 new", "context of 256")
    assert not (own_cache / "logs").exists()  # no worker was started


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", "a", "--prompt-file", "b"], "either --prompt"),
        ([], "either --prompt"),
        (["--prompt-file", "no/such/file"], "cannot read no/such/file"),
        (["--prompt", "a", "--route", "no-such"], "no route is called 'no-such'"),
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
        (["--dtype", "f16"], "dtype 'f16'"),
        (["--weights", "q4"], "weight format 'q4'"),
        (["--device", "tpu"], "device is called 'tpu'"),
        (["--model", ""], "name is empty"),
        (["--chat"], "no chat template"),
    ],
)
def test_usage_errors_are_found_before_any_route_is_loaded(
    run: Run, fakes: Callable[..., None], own_cache: Path, tmp_path: Path,
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


@pytest.mark.parametrize("route", ["Good", "all"])
def test_device_of_another_machine_is_no_usage_error(
    run: Run, checkpoint: str, fakes: Callable[..., None], route: str
) -> None:
    fakes("Good")
    code, out, err = run("generate", "--model", checkpoint, "--prompt", "a", "--route", route, "--device", "cuda")
    assert code == 3
    assert "not on cuda" in out + err


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize("path", ["/proc/shipway.json", "n" * 256])
def test_json_path_that_cannot_be_made_is_found_before_the_work(run: Run, command: str, path: str) -> None:
    code, _, err = run(command, "--model", "no-such-model", "--json", path)
    assert_one_line(code, 2, err, "cannot write", path)


def test_full_cache_is_named_when_a_route_breaks_while_preparing(
    run: Run, checkpoint: str, fakes: Callable[..., None], monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    fakes("Unprepared")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shipway.client.shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
    for route in ("Unprepared", "all"):
        code, _, err = run("generate", "--model", checkpoint, "--prompt", "a", "--route", route)
        assert_one_line(code, 2, err, f"the disk of the cache {own_cache} has 1.0 MB free")


def test_characters_the_terminal_cannot_show_are_replaced(checkpoint: str) -> None:
    code = (
        "import sys; sys.argv = ['shipway', 'report', 'r.json']; import shipway.cli.report as command;"
        "command.read_result = lambda path: sys.stdout.write('caf\\xe9 \\U0001f600 \\udcff\\n') and sys.exit(0);"
        "from shipway.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf? ? ?\n", "")


def test_prompt_file_that_is_not_text_is_refused(run: Run, checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "p.bin").write_bytes(b"ab\xff\xfe")
    code, _, err = run("generate", "--threads", 1, "--model", checkpoint, "--prompt-file", tmp_path / "p.bin")
    assert_one_line(code, 2, err, "byte 2 is 0xff")


def test_unknown_option_exits_with_2(run: Run) -> None:
    assert run("generate", "--no-such-option")[0] == 2
    assert run("no-such-command")[0] == 2


def test_unforeseen_error_is_one_line_and_its_traceback_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(path: object) -> None:
        raise KeyError("a bug\nof two lines")

    monkeypatch.setattr("shipway.cli.report.read_result", breaks)
    code, _, err = run("report", "r.json")
    assert_one_line(code, 1, err, "KeyError", "traceback: ")
    log = Path(re.search(r"traceback: (\S+)", err)[1])  # type: ignore[index]
    assert "in breaks" in log.read_text()


def start(checkpoint: str, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "shipway.cli",
        "generate",
        "--threads",
        "1",
        "--model",
        checkpoint,
        "--route",
        "torch-eager",
    ]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_reader_that_goes_away_ends_the_command_quietly(checkpoint: str) -> None:
    process = start(checkpoint, "--prompt", "a", "--max-new", "200", "--temperature", "2")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""


def test_ctrl_c_ends_the_command_and_its_worker(checkpoint: str) -> None:
    process = start(checkpoint, "--prompt", "a", "--max-new", "250", "--temperature", "2")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=60)
    assert process.stderr.read() == "shipway: interrupted\n"
    assert code == 130
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_routes_are_listed_with_what_they_take(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("routes", "--json", tmp_path / "r.json")
    assert code == 0
    documents = {route["name"]: route for route in json.loads((tmp_path / "r.json").read_text())["routes"]}
    assert documents.keys() == ROUTES.keys()
    for name, info in ROUTES.items():
        assert name in out
        assert documents[name]["dtypes"] == list(info.dtypes)


def test_route_whose_packages_are_missing_is_listed_with_its_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    info = dataclasses.replace(fake_routes.info("Good"), requires=("no_such_module",), remedy="pip install it")
    monkeypatch.setitem(ROUTES, "fake", info)
    _, out, _ = run("routes")
    assert "needs no_such_module: pip install it" in out
    code, out, _ = run("doctor")
    assert code == 0  # an extra that is not installed, while other routes run
    assert "pip install it" in out
    for name in set(ROUTES) - {"fake"}:
        monkeypatch.delitem(ROUTES, name)
    assert run("doctor")[0] == 3


def test_inspect_says_what_a_checkpoint_is(run: Run, checkpoint: str, tmp_path: Path) -> None:
    code, out, _ = run("inspect", checkpoint, "--context", 100, "--json", tmp_path / "i.json")
    assert code == 0
    document = json.loads((tmp_path / "i.json").read_text())
    assert document["architecture"] == "llama"
    assert f"{document['parameters']:,} parameters" in out
    assert "100 tokens" in out
    for name in ROUTES:
        assert name in out


def test_inspect_of_nothing_is_one_line(run: Run, tmp_path: Path) -> None:
    code, _, err = run("inspect", tmp_path)
    assert_one_line(code, 2, err)


def test_inspect_refuses_an_empty_name_and_a_context_the_model_has_not(run: Run, checkpoint: str) -> None:
    code, _, err = run("inspect", "")
    assert_one_line(code, 2, err, "name is empty")
    code, _, err = run("inspect", checkpoint, "--context", 257)
    assert_one_line(code, 2, err, "257", "256")


def test_doctor_finds_wrong_and_missing_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = doctor.pins()
    versions: dict[str, Any] = pins | {"torch": pins["torch"] + "+cpu", "max": "1.0"}
    del versions["mojo"]
    monkeypatch.setattr("shipway.measure.environment.package_versions", lambda: versions)
    checks = {check.name: check for check in doctor._package_checks()}
    assert checks["torch"].status == "ok"
    assert checks["max"].status == "fail"
    assert checks["max"].remedy == f"pip install max=={pins['max']}"
    assert checks["mojo"].status == "fail"


def test_doctor_finds_a_package_that_cannot_be_imported(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_module.py").write_text("raise ImportError('libnone.so: not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ROUTES, "fake", dataclasses.replace(fake_routes.info("Good"), requires=("broken_module",)))
    code, out, _ = run("doctor")
    assert code == 3
    assert "libnone.so: not found" in out


def test_doctor_finds_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "file" / "cache"))
    check = next(doctor._cache_checks())
    assert check.status == "fail"
    assert "SHIPWAY_CACHE" in check.remedy
