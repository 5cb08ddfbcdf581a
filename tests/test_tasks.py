"""``dev`` and pixi run the same commands, from environments that exist and agree on every version."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

import ledger
from shipway.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TASKS = PIXI["tasks"]
ARGUMENTS = ["--json", "a b.json", "it's"]

# Writes its name and arguments, one JSON list a line, into $LOG; fails when asked to.
STUB = f"""#!/bin/sh
{shlex.quote(sys.executable)} -c 'import json, os, sys
print(json.dumps([os.path.basename(sys.argv[1]), *sys.argv[2:]]), file=open(os.environ["LOG"], "a"))' "$0" "$@"
case "$*" in "-m pip "*) exit "${{PIP_EXIT:-0}}" ;; esac
"""


class Checkout:
    """A copy of what ``dev`` reads, beside an environment whose programs only say how they were called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("dev", "pixi.toml", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        self.log = root / "log"
        self.system = root / "system"
        self.system.mkdir()
        for name in ("sh", "cat", "cksum", "date", "dirname", "rm"):
            (self.system / name).symlink_to(shutil.which(name) or name)
        (self.system / "python3").symlink_to(sys.executable)
        programs = {"python", "pip"} | {command[0] for name in TASKS for command in pixi_commands(name, [])}
        for program in programs:
            self.stub(root / ".venv/bin" / program)

    @staticmethod
    def stub(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
        path.chmod(0o755)

    def dev(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs ``./dev`` where nothing but the stubs, a few system tools and Python can be found."""
        self.log.write_text("")
        env = {"PATH": str(self.system), "LOG": str(self.log), "HOME": str(self.root)} | env
        return subprocess.run([self.root / "dev", *arguments], env=env, capture_output=True, text=True, cwd=self.root)

    def calls(self) -> list[list[str]]:
        """What the stubs were called with, but for ``dev`` asking whether .venv works."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [call for call in lines if call not in (["python", "-c", ""], ["pip", "--version"])]

    def pip_calls(self) -> list[list[str]]:
        return [call for call in self.calls() if call[:3] == ["python", "-m", "pip"]]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def pixi_commands(task: str, arguments: list[str]) -> list[list[str]]:
    """What pixi runs for ``pixi run task *arguments``: an array as it is, a string as shell, arguments at the end."""
    command = TASKS[task]["cmd"]
    if isinstance(command, list):
        return [[*command, *arguments]]
    steps = [shlex.split(step) for step in command.split(" && ")]
    return [*steps[:-1], [*steps[-1], *arguments]]


@pytest.mark.parametrize("task", TASKS)
def test_dev_runs_the_command_that_pixi_runs(checkout: Checkout, task: str) -> None:
    assert checkout.dev(task, *ARGUMENTS).returncode == 0
    ran = [call for call in checkout.calls() if call[:3] != ["python", "-m", "pip"]]
    assert ran == pixi_commands(task, ARGUMENTS)


def test_every_command_of_shipway_is_a_task() -> None:
    commands = typer.main.get_group(app).commands
    assert {name: ["shipway", name] for name in commands} == {
        name: task["cmd"] for name, task in TASKS.items() if task["cmd"][0] == "shipway"
    }


def test_dev_hands_over_to_pixi_where_it_is_installed(checkout: Checkout) -> None:
    checkout.stub(checkout.system / "pixi")
    assert checkout.dev("bench", *ARGUMENTS).returncode == 0
    assert checkout.calls() == [["pixi", "run", "bench", *ARGUMENTS]]
    assert checkout.dev("bench", *ARGUMENTS, SHIPWAY_NO_PIXI="1").returncode == 0
    assert checkout.calls()[-1] == ["shipway", "bench", *ARGUMENTS]
    assert checkout.dev("--help").returncode == 0
    assert checkout.calls() == [["pixi", "task", "list"]]


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",)])
def test_dev_alone_or_asked_for_help_lists_every_task(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    done = checkout.dev(*arguments)
    listed = [line.split()[0] for line in done.stderr.splitlines() if line.startswith("  ")]
    assert (done.returncode, listed, checkout.calls()) == (0, list(TASKS), [])


def test_unknown_task_is_one_line_and_installs_nothing(checkout: Checkout) -> None:
    done = checkout.dev("no-such-task")
    assert (done.returncode, done.stderr) == (2, "dev: no task no-such-task: ./dev lists them\n")
    assert checkout.dev("").returncode == 2
    assert checkout.calls() == []


def test_second_start_installs_nothing(checkout: Checkout) -> None:
    checkout.dev("bench")
    assert checkout.pip_calls()[0][3:] == ["install", "--upgrade", "pip"]
    assert checkout.pip_calls()[1][3:] == ["install", "--editable", ".[xla,tvm,targets,simt]"]
    checkout.dev("bench")
    assert checkout.pip_calls() == []


def test_testing_tasks_add_their_tools_and_product_tasks_keep_them(checkout: Checkout) -> None:
    checkout.dev("bench")
    checkout.dev("test")
    assert checkout.pip_calls()[1][-1] == ".[xla,tvm,targets,simt,test,dev]"
    checkout.dev("bench")
    assert checkout.pip_calls() == []


def test_changed_pins_are_installed(checkout: Checkout) -> None:
    checkout.dev("bench")
    with (checkout.root / "pyproject.toml").open("a") as pins:
        pins.write("# changed\n")
    checkout.dev("bench")
    assert len(checkout.pip_calls()) == 2


def test_interrupted_installation_is_done_again(checkout: Checkout) -> None:
    done = checkout.dev("bench", PIP_EXIT="1")
    assert done.returncode == 3
    assert ["shipway", "bench"] not in checkout.calls()
    checkout.dev("bench")
    assert len(checkout.pip_calls()) == 2


def test_pins_put_back_after_a_failed_change_are_installed_again(checkout: Checkout) -> None:
    pins = checkout.root / "pyproject.toml"
    before = pins.read_text()
    checkout.dev("bench")
    pins.write_text(before + "# changed\n")
    checkout.dev("bench", PIP_EXIT="1")
    pins.write_text(before)
    checkout.dev("bench")
    assert len(checkout.pip_calls()) == 2


def test_two_first_starts_install_one_after_the_other(checkout: Checkout) -> None:
    pip = f"echo begin >>log; {shutil.which('sleep')} 1; echo end >>log"
    (checkout.root / ".venv/bin/python").write_text(f'#!/bin/sh\ncase "$*" in "-m pip "*) {pip} ;; esac\n')
    env = {"PATH": str(checkout.system), "LOG": str(checkout.log)}
    both = [
        subprocess.Popen([checkout.root / "dev", "bench"], env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    lines = checkout.log.read_text().splitlines()
    assert [line for line in lines if line in ("begin", "end")] == ["begin", "end"] * 2  # upgraded, then installed
    assert sorted("another ./dev is installing into .venv: waiting for it" in err for err in said) == [False, True]


def test_lock_of_a_killed_installation_holds_nobody_up(checkout: Checkout) -> None:
    began = checkout.root / "began"
    (checkout.root / ".venv/bin/python").write_text(
        f'#!/bin/sh\ncase "$*" in "-m pip "*) : >began; exec {shutil.which("sleep")} 60 ;; esac\n'
    )
    command = [checkout.root / "dev", "bench"]
    with subprocess.Popen(command, env={"PATH": str(checkout.system)}, start_new_session=True) as first:
        while not began.exists():
            time.sleep(0.02)
        os.killpg(first.pid, signal.SIGKILL)
    checkout.stub(checkout.root / ".venv/bin/python")
    done = checkout.dev("bench")
    assert done.returncode == 0
    assert "waiting" not in done.stderr
    assert len(checkout.pip_calls()) == 2


def test_task_does_not_inherit_the_lock(checkout: Checkout) -> None:
    (checkout.root / ".venv/bin/shipway").write_text("#!/bin/sh\nexec ls /proc/self/fd\n")
    (checkout.system / "ls").symlink_to(shutil.which("ls") or "ls")
    assert "9" not in checkout.dev("doctor").stdout.split()


def test_old_python_is_one_line(checkout: Checkout) -> None:
    (checkout.system / "python3").unlink()
    (checkout.system / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n')
    (checkout.system / "python3").chmod(0o755)
    done = checkout.dev("bench")
    assert done.returncode == 3
    assert done.stderr == "dev: needs Python 3.11 to 3.14, found Python 3.9.2: install one as python3\n"


def test_environments_name_features_and_platforms_that_exist() -> None:
    platforms = {entry if isinstance(entry, str) else entry["name"] for entry in PIXI["workspace"]["platforms"]}
    assert set(PIXI["environments"]) == {"default", "nvidia", "amd"}
    for environment in PIXI["environments"].values():
        assert set(environment["features"]) <= set(PIXI["feature"])
    for feature in PIXI["feature"].values():
        assert set(feature["platforms"]) <= platforms
    groups = [environment["solve-group"] for environment in PIXI["environments"].values()]
    assert len(set(groups)) == len(groups), "each environment has a torch of its own and cannot share a solution"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pins_are_exact_and_those_of_pixi_agree() -> None:
    listed = [*PROJECT["dependencies"], *(pin for extra in PROJECT["optional-dependencies"].values() for pin in extra)]
    pins: dict[str, str] = {}
    for requirement in map(Requirement, listed):
        specifier = str(requirement.specifier)
        assert specifier.startswith("=="), f"{requirement} is not pinned"
        assert pins.setdefault(canonical(requirement.name), specifier) == specifier
    tables = [PIXI["dependencies"], PIXI["constraints"]]
    tables += [feature["pypi-dependencies"] for feature in PIXI["feature"].values()]
    for table in tables:
        for name, wanted in table.items():
            if name != "python":
                assert pins[canonical(name)] == (wanted if isinstance(wanted, str) else wanted["version"])


def test_pixi_installs_this_package_with_extras_that_exist() -> None:
    package = PIXI["pypi-dependencies"]["shipway"]
    assert (package["path"], package["editable"]) == (".", True)
    assert set(package["extras"]) <= set(PROJECT["optional-dependencies"])
    assert PIXI["dependencies"]["python"].removesuffix(".*") in PROJECT["requires-python"]


def test_dev_sets_the_environment_that_pixi_activates(checkout: Checkout) -> None:
    (checkout.root / ".venv/bin/shipway").write_text("#!/bin/sh\nset\n")
    printed = checkout.dev("doctor").stdout
    for name, value in PIXI["activation"]["env"].items():
        if name != "MODULAR_MOJO_MAX_IMPORT_PATH":  # conda's layout; the PyPI packages find themselves
            assert re.search(rf"^{name}='?{value}'?$", printed, re.MULTILINE)


def test_contributing_prints_the_ledger() -> None:
    rows = re.findall(r"^\| ([\w ]+?) +\| +(\d+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert {part: int(minutes) for part, minutes in rows} == ledger.MINUTES
    assert sum(ledger.MINUTES.values()) == 45


def test_overdrawn_part_is_named_and_others_are_not() -> None:
    seconds = {ledger.UNIT: 1.6 * 60 * ledger.MINUTES[ledger.UNIT], ledger.LINT: 60.0 * ledger.MINUTES[ledger.LINT]}
    assert [line.split(" took")[0] for line in ledger.overdrawn(seconds)] == [ledger.UNIT]


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_overdrawn_part_fails_the_run_in_ci_only(ci: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    env = os.environ | {"CI": ci, "SHIPWAY_SPENT": json.dumps({ledger.INSTALL: 9999.0})}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-c", os.devnull, str(tmp_path)]
    env["PYTHONPATH"] = str(ROOT / "tests")
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stdout
    assert "install took 166.7 minutes" in done.stdout
    assert "1 passed" in done.stdout.splitlines()[-1]
