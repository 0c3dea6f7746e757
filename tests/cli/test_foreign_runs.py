"""A run folder from somebody else is data: nothing in it runs, redirects writing, or controls the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_process import Stepscope

from builders import case_of, make_result, make_samples, make_system
from stepscope.cli.resume import rehearse
from stepscope.records import Benchmark, Failure, Notice, OperatorRequest, add_seal, make_request
from stepscope.store import RunWriter, StoredRun, create_run, record_failure

OPS = ["stepscope", "bench", "ops", "--op", "gemm", "--shape", "m=8,n=8,k=8", "--quick", "--max-samples", "5"]
COMMS = ["stepscope", "bench", "comms", "--collective", "all_reduce", "--sizes", "1K", "--ranks", "2", "--quick"]
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202egnirts\u2028"
CONTROLS = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2028"]


def plant(store: Path, command: list[str]) -> Path:
    """A run that the command would have begun."""
    job = rehearse(command)
    assert job is not None
    return create_run(
        store, verb=job.verb, name="planted", command=command, request=job.request, cases=job.cases,
        launcher=job.launcher, world_size=job.world_size,
    )  # fmt: skip


def change_plan(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As an attacker would: with a seal that is right."""
    plan = json.loads((folder / "plan.json").read_bytes())
    del plan["seal"]
    change(plan)
    (folder / "plan.json").write_bytes(add_seal(json.dumps(plan).encode()))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that anybody could import, and what it leaves behind when somebody does."""
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'sprung')!r}).touch()\ndef run(*a, **k): pass\nbuild = run\n"
    (tmp_path / "evil_worker.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "sprung"


def set_file(plan: dict[str, Any]) -> None:
    """Run a Python file that lies in the folder, under another command."""
    case = plan["cases"][0]
    user_model = {"device": "cpu", "file": "FOLDER/evil.py", "function": "build", "sha256": "0" * 12}
    case["spec"] = {"kind": "user_model", **user_model}
    plan["verb"] = "workload"


PLANS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a worker to import": lambda plan: plan["request"].update(worker="evil_worker:run"),
    "a launcher": lambda plan: plan.update(launcher="self"),
    "ranks without end": lambda plan: plan.update(launcher="torchrun", world_size=100_000),
    "processes without end": lambda plan: plan["request"].update(processes=1_000_000),
    "another verb": lambda plan: plan.update(verb="workload"),
    "a verb that is none": lambda plan: plan.update(verb="__import__"),
    "a file to run": set_file,
    "another case": lambda plan: plan["cases"][0]["spec"]["shape"].update(m=1 << 40),
    "another device": lambda plan: plan["request"].update(device="cuda:0"),
    "other settings": lambda plan: plan["request"]["settings"].update(max_time_s=1e9),
    "another command": lambda plan: plan.update(command=["sh", "-c", "touch sprung"]),
    "another verb of ours": lambda plan: plan.update(command=["stepscope", "runs", "rm", plan["run_id"]]),
    "a command that lists": lambda plan: plan.update(command=["stepscope", "bench", "ops", "--list"]),
    "no command": lambda plan: plan.update(command=[]),
    "an option that is none": lambda plan: plan["command"].append("--no-such-option"),
}


@pytest.mark.parametrize("attack", PLANS)
def test_a_plan_that_its_command_does_not_ask_for_is_refused(
    here: Stepscope, store: Path, trap: Path, attack: str
) -> None:
    folder = plant(store, OPS)
    (folder / "evil.py").write_text((trap.parent / "evil_worker.py").read_text())
    change_plan(folder, PLANS[attack])
    before = sorted(path.name for path in folder.iterdir())
    answer = here("runs", "resume", folder.name, "--trust", "--json")
    if attack == "a worker to import":  # which is not what decides who measures
        assert answer.code == 0
    else:
        assert answer.code == 2
        assert "is not continued" in answer.error["message"]
        assert sorted(path.name for path in folder.iterdir()) == before
    assert not trap.exists()


@pytest.mark.ranks
def test_ranks_do_not_import_a_worker_that_a_plan_names(stepscope: Stepscope, store: Path, trap: Path) -> None:
    folder = plant(store, COMMS)
    change_plan(folder, PLANS["a worker to import"])
    assert stepscope("runs", "resume", folder.name, "--json").code == 0
    assert not trap.exists()


def test_the_same_plan_is_refused_where_bench_resumes_it(here: Stepscope, store: Path, trap: Path) -> None:
    folder = plant(store, OPS)
    change_plan(folder, PLANS["another case"])
    for arguments in (["bench", "ops"], OPS[1:]):
        answer = here(*arguments, "--resume", folder.name, "--json")
        assert answer.code == 2, arguments
        assert list(folder.glob("journal*")) == []


def test_what_the_command_asks_for_goes_on(here: Stepscope, store: Path) -> None:
    folder = plant(store, OPS)
    answer = here("runs", "resume", folder.name)
    assert answer.code == 0
    assert "continuing: stepscope bench ops --op gemm" in answer.err
    assert StoredRun(folder).run is not None


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_file_is_run_only_where_its_user_says_so(here: Stepscope, store: Path, trap: Path, place: str) -> None:
    """The command names it and its content is the planned one: that is still somebody else's code."""
    file = trap.parent / "evil_worker.py"
    folder = plant(store, ["stepscope", "bench", "workload", f"{file}:build", "--quick"])
    if place == "inside":
        file = file.rename(folder / file.name)
        change_plan(folder, lambda plan: plan.update(command=[*plan["command"][:3], f"{file}:build", "--quick"]))
    answer = here("runs", "resume", folder.name, "--json")
    assert answer.code == 2
    if place == "outside":
        assert f"runs the file {file}" in answer.error["message"]
        assert answer.error["hint"].endswith("--trust")
    assert not trap.exists()
    assert here("bench", "workload", "--resume", folder.name, "--json").code == 2
    assert not trap.exists()


def test_a_table_is_replaced_only_where_its_user_says_so(here: Stepscope, store: Path, tmp_path: Path) -> None:
    table = tmp_path / "deep" / "precious.csv"
    folder = plant(store, [*OPS, "--table", str(table)])
    assert not table.parent.exists()
    table.parent.mkdir()
    table.write_text("precious")
    answer = here("runs", "resume", folder.name, "--json")
    assert f"replaces the file {table}" in answer.error["message"]
    assert table.read_text() == "precious"
    change_plan(folder, lambda plan: plan["request"].update(table=str(tmp_path / "other.csv")))
    assert here("runs", "resume", folder.name, "--trust", "--json").code == 0
    assert (table.read_text().startswith("op,"), (tmp_path / "other.csv").exists()) == (True, False)


@pytest.mark.parametrize("name", ["samples/rank-0.jsonl", "begun.json", "ranks", "ranks/rank-0.log", "processes"])
@pytest.mark.parametrize("way", [("runs", "resume", "RUN"), (*OPS[1:], "--resume", "RUN"), (*OPS[1:], "--resume")])
def test_links_are_not_written_through(
    here: Stepscope, store: Path, tmp_path: Path, name: str, way: tuple[str, ...]
) -> None:
    folder = plant(store, OPS)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(victim)
    answer = here(*(folder.name if word == "RUN" else word for word in way), "--json")
    assert answer.code == 2
    assert "symbolic link" in answer.error["message"]
    assert victim.read_text() == "precious"


def test_a_folder_of_another_user_is_refused_with_a_way_to_go_on(here: Stepscope, store: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    folder = plant(store, OPS)
    os.chown(folder, 12345, -1)
    answer = here("runs", "resume", folder.name, "--json")
    assert answer.code == 2
    assert "another user" in answer.error["message"]
    assert "copy" in answer.error["hint"]


def test_runs_of_an_outer_launcher_are_continued_under_it(here: Stepscope, store: Path) -> None:
    folder = plant(store, COMMS)
    change_plan(folder, lambda plan: plan.update(launcher="torchrun"))
    answer = here("runs", "resume", folder.name, "--json")
    assert answer.code == 2
    assert "torchrun started its 2 ranks" in answer.error["message"]
    assert answer.error["hint"].endswith(f"--resume {folder.name}")


# What is shown


@pytest.fixture
def evil_run(store: Path) -> Path:
    """Control characters wherever a record takes a text."""
    benchmark = Benchmark(model="gemm", implementation="micro", mode="forward", config="custom", description=EVIL)
    cases = [case_of(benchmark, {f"k{EVIL}": f"v{EVIL}\n", "m": m}) for m in (1, 2)]
    folder = create_run(
        store,
        verb="ops",
        name="evil",
        command=["stepscope", EVIL, "\nintact"],
        request=OperatorRequest(device=EVIL),
        cases=cases,
    )
    record_failure(folder, Failure(kind="rank_died", message=EVIL, hint=EVIL, last_lines=[EVIL]))
    system = make_system(libraries={f"torch{EVIL}": EVIL}, environment={"A": EVIL}, settings={EVIL: EVIL})
    host = type(system.hosts[0])(
        name=EVIL, os=EVIL, kernel=EVIL, cpu=system.hosts[0].cpu, memory=system.hosts[0].memory
    )
    cpu = type(host.cpu)(model=f"CPU{EVIL}\n", architecture=EVIL, threads=1, usable_threads=1)
    host = type(host)(name=EVIL, os=EVIL, kernel=EVIL, cpu=cpu, memory=host.memory)
    with RunWriter(folder) as writer:
        writer.write_system(msgspec.structs.replace(system, collected_at=EVIL, hosts=[host], python=EVIL))
        notices = [Notice(kind="k", message=EVIL, hint=EVIL)]
        writer.append(
            make_result(cases[0], notices=notices, observed={EVIL: EVIL}), [make_samples(cases[0], [0.1] * 9)]
        )
        writer.append(make_result(cases[1], failure=Failure(kind=EVIL, message=EVIL, hint=EVIL)))
        writer.finish()
    return folder.rename(folder.with_name(f"20260101-evil{EVIL[:-1]}"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs", "list"),
        ("runs", "show", "RUN"),
        ("runs", "verify"),
        ("runs", "sql", "SELECT * FROM runs, systems, cases"),
        ("runs", "export"),
        ("runs", "export", "--format", "markdown"),
        ("runs", "resume", "RUN"),
        ("report",),
        ("report", "--format", "csv"),
        ("report", "--format", "html"),
        ("compare", "RUN", "RUN"),
        ("check", "RUN", "--baseline", "RUN"),
        ("compare", "\x1b[2Jnone", "RUN"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_nothing_from_a_run_controls_the_terminal(
    here: Stepscope, evil_run: Path, arguments: tuple[str, ...], form: tuple[str, ...]
) -> None:
    answer = here(*(str(evil_run) if word == "RUN" else word for word in arguments), *form)
    shown = answer.out + answer.err
    assert answer.code in {0, 2, 4}, shown
    assert "defect" not in shown
    assert [repr(char) for char in CONTROLS if char in shown.replace("\n", "").replace("\t", "")] == []
    if form:
        json.loads(answer.out)
    elif arguments[0] == "runs" and arguments[1] in {"list", "verify"}:
        titles = 1 if arguments[1] == "list" else 0
        assert len(answer.out.splitlines()) == titles + 1  # a name with a line break does not make a line of its own


@pytest.mark.parametrize("ending", ["html", "md", "csv", "json", "txt"])
def test_pages_and_tables_in_files_are_as_harmless(
    here: Stepscope, evil_run: Path, tmp_path: Path, ending: str
) -> None:
    page = tmp_path / f"page.{ending}"
    assert here("report", str(evil_run), "-o", str(page)).code == 0
    content = page.read_text()
    assert [repr(char) for char in CONTROLS if char in content.replace("\n", "").replace("\t", "")] == []


def test_markup_from_a_run_stays_text(here: Stepscope, store: Path, tmp_path: Path) -> None:
    markup = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    benchmark = Benchmark(model="gemm", implementation="micro", mode="forward", config="custom", description=markup)
    case = case_of(benchmark, {markup: markup})
    folder = create_run(
        store, verb="ops", name="x", command=["stepscope", markup], request=make_request("ops", {}), cases=[case]
    )
    with RunWriter(folder) as writer:
        writer.write_system(make_system(libraries={markup: markup}))
        notices = [Notice(kind="k", message=markup, hint=markup)]
        writer.append(make_result(case, notices=notices, observed={markup: markup}), [make_samples(case, [0.1] * 9)])
        writer.finish()
    page = tmp_path / "page.html"
    assert here("report", "-o", str(page)).code == 0
    assert "<script>alert" not in page.read_text()
    assert "<img src=x" not in page.read_text()
