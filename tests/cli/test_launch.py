"""``shardwise launch``: what is printed and written, and what is started in its place."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import launch, main
from shardwise.comm.machine.interfaces import Interface

RECIPE = "run: {device: cpu}\nlaunch: {nodes: 2, nproc: 4, address: 10.0.0.2}\n"


class Became(Exception):
    """What stands for the program that this process became."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, on a host with one address."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE, "utf-8")
    own = Interface("eth1", "10.0.0.2")
    monkeypatch.setattr(launch, "interfaces", lambda: [own])
    monkeypatch.setattr(launch, "interface_to", lambda _: own)
    monkeypatch.delenv("SHARDWISE_RUN_TOKEN", raising=False)
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    out, error = capsys.readouterr()
    assert caught.value.code == code, error
    return out + error


def torchrun_lines(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if " torchrun " in line]


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("hosts", "", "''"),
        ("hosts", "a,,b", "''"),
        ("hosts", "a, b", "' b'"),
        ("hosts", "a:2,b:2", "'a:2'"),
        ("address", "", "''"),
        ("address", "10.0.0.2:29500", "'10.0.0.2:29500'"),
    ],
)
def test_what_names_no_host_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, named: str
) -> None:
    text = output(capsys, "my.yaml", f"--{option}", value, code=1)
    rule = "it must be the name or address of a host, without port or brackets"
    assert f"override --launch.{option} is {named}; {rule}" in text


def test_hosts_of_a_recipe_are_names_and_its_interface_has_one(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert "--launch.interface is ''; it must not be empty" in output(
        capsys, "my.yaml", "--interface", "", code=1
    )
    (here / "my.yaml").write_text("launch: {hosts: [a, '']}\n", "utf-8")
    assert "launch.hosts is ''; it must be the name" in output(capsys, "my.yaml", code=1)


def test_the_line_for_every_node_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "my.yaml", "--interface", "eth 0;x")
    [line] = [line for line in text.splitlines() if line.endswith("--start")]
    assert "--interface=eth 0;x" in shlex.split(line)


def test_threads_are_as_many_as_this_shell_has_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert all("OMP_NUM_THREADS=7" in line for line in torchrun_lines(output(capsys, "my.yaml")))


def test_the_lines_of_both_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "my.yaml", "--run.steps", "10")
    first, second = torchrun_lines(text)
    assert "--node-rank=0" in first
    assert "--node-rank=1" in second
    assert first[-5:] == ["shardwise.cli", "train", "my.yaml", "--run.steps", "10"]
    # This host's interface is known; the other finds its own, whose name may be another.
    assert "GLOO_SOCKET_IFNAME=eth1" in first
    assert "GLOO_SOCKET_IFNAME=eth1" not in second
    tokens = set(re.findall(r"SHARDWISE_RUN_TOKEN=(\w{32})", text))
    assert len(tokens) == 1
    assert "meeting   10.0.0.2:29500, this host's eth1" in text


def test_one_line_for_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "my.yaml", "--nodes", "3", "--hosts", "10.0.0.2,b,c")
    [line] = [line for line in text.splitlines() if line.endswith("--start")]
    words = shlex.split(line)
    assert words[1:4] == ["shardwise", "launch", "my.yaml"]
    assert "--hosts=10.0.0.2,b,c" in words
    assert "--node-rank=$NODE_RANK" in shlex.split(
        next(x for x in output(capsys, "my.yaml", "--nodes", "3").splitlines() if "--start" in x)
    )


def test_a_node_starts_as_that_line_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    became = []

    def become(_program: str, words: list[str], environ: dict[str, str]) -> None:
        became.append((words, environ))
        raise Became

    monkeypatch.setattr(os, "execvpe", become)
    assert "SHARDWISE_RUN_TOKEN is not set" in output(capsys, "my.yaml", "--start", code=1)
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "secret")
    monkeypatch.setenv("RANK", "7")
    with pytest.raises(Became):
        main(["launch", "my.yaml", "--start"])
    [(words, environ)] = became
    assert "--node-rank=0" in words  # it has the address
    assert environ["SHARDWISE_RUN_TOKEN"] == "secret"
    assert "RANK" not in environ
    assert capsys.readouterr().out.startswith("note      this shell has set RANK=7")


def test_mpirun_takes_this_ones_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    def become(_program: str, words: list[str], environ: dict[str, str]) -> None:
        assert environ["MASTER_ADDR"] == "a"
        raise Became(" ".join(words))

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/mpirun")
    (here / "hosts").write_text("a slots=4\nb slots=4\n", "utf-8")
    (here / "m.yaml").write_text("run: {device: cpu}\n", "utf-8")
    with pytest.raises(Became, match=r"^mpirun -n 8 --host a:4,b:4 "):
        main(["launch", "m.yaml", "--mpi", "--hostfile", "hosts"])
    text = output(capsys, "m.yaml", "--mpi", "--hostfile", "hosts", "--nproc", "5", code=1)
    assert "each node has 5 ranks, and a takes 4." in text


def test_slots_that_no_rank_gets_are_noted(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "hosts").write_text("a slots=4\nb slots=8\n", "utf-8")
    noted = output(capsys, "my.yaml", "--hostfile", "hosts")
    assert noted.startswith("note      4 slots of hosts have no rank: each node has 4\n")
    (here / "hosts").write_text("a slots=4\nb slots=4\n", "utf-8")
    assert "slots" not in output(capsys, "my.yaml", "--hostfile", "hosts")


@pytest.mark.parametrize(
    ("option", "name", "line"),
    [
        ("--slurm", "my.sbatch", "sbatch my.sbatch"),
        ("--ray", "my.ray.py", "python my.ray.py"),
        ("--k8s", "my.k8s.yaml", "kubectl apply -f my.k8s.yaml"),
        ("--sky", "my.sky.yaml", "sky jobs launch --secret SHARDWISE_RUN_TOKEN=$(openssl rand"),
    ],
)
def test_a_file_for_each_launcher(
    capsys: pytest.CaptureFixture[str], here: Path, option: str, name: str, line: str
) -> None:
    assert f"wrote     {name}: {line}" in output(capsys, "my.yaml", option)
    assert (here / name).exists()
    assert f"{name} exists" in output(capsys, "my.yaml", option, code=1)
    output(capsys, "my.yaml", option, "--overwrite")


@pytest.mark.parametrize("option", ["--slurm", "--k8s"])
def test_a_job_has_a_name_that_launchers_take(
    capsys: pytest.CaptureFixture[str], here: Path, option: str
) -> None:
    (here / "réci pe.yaml").write_text(RECIPE, "utf-8")
    name = output(capsys, "réci pe.yaml", option).split()[-1]
    text = (here / name).read_text("utf-8")
    assert name.startswith("r-ci-pe.")
    assert "--job-name=r-ci-pe\n" in text or "\n  r-ci-pe.yaml: " in text


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--output", "x.sh"), "--output"),
        (("--node-rank", "1"), "--node-rank"),
        (("--image", "x"), "--image"),
        (("--slurm", "--start"), "--start"),
        (("--ray", "--accelerator", "A100"), "--accelerator"),
    ],
)
def test_an_option_of_another_launcher_is_refused(
    capsys: pytest.CaptureFixture[str], here: Path, arguments: tuple[str, ...], option: str
) -> None:
    assert f"error: {option} changes nothing" in output(capsys, "my.yaml", *arguments, code=1)
    assert [path.name for path in here.iterdir()] == ["my.yaml"]


def test_the_line_for_every_node_has_the_interface(capsys: pytest.CaptureFixture[str]) -> None:
    line = next(
        line
        for line in output(capsys, "my.yaml", "--interface", "eth1").splitlines()
        if "--start" in line
    )
    assert "--interface=eth1" in line


def test_one_node_is_started_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def become(_: str, words: list[str], __: object) -> None:
        raise Became(words)

    monkeypatch.setattr(os, "execvpe", become)
    with pytest.raises(Became) as caught:
        main(["launch", "my.yaml", "--nodes", "1", "--start"])
    assert caught.value.args[0][-3:] == ["train", "my.yaml", "--nproc=4"]


def test_a_node_rank_beyond_the_nodes_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "a")
    text = output(capsys, "my.yaml", "--start", "--node-rank", "2", code=1)
    assert "--node-rank is 2, and the 2 nodes are numbered from 0 to 1." in text


def test_two_launchers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "my.yaml", "--slurm", "--mpi", code=2)
    assert "--slurm and --mpi exclude each other" in text


def test_a_file_with_the_token_is_for_its_owner_alone(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    output(capsys, "my.yaml", "--k8s")
    assert (here / "my.k8s.yaml").stat().st_mode & 0o777 == 0o600


def test_how_many_ranks_a_node_elsewhere_has_is_asked_for(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "gpu.yaml").write_text("launch: {nodes: 2}\n", "utf-8")
    assert "Pass --nproc" in output(capsys, "gpu.yaml", "--slurm", code=1)


def test_one_node_needs_no_other_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    line = output(capsys, "demo", "--nproc", "2", "--restarts", "3")
    assert "shardwise train demo --nproc=2 --restarts=3" in line


def test_an_interface_that_is_not_here_is_named(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "my.yaml").write_text("run: {device: cpu}\nlaunch: {nodes: 2, nproc: 4}\n", "utf-8")
    text = " ".join(output(capsys, "my.yaml", "--interface", "eth7", code=1).split())
    assert "this host has no address at eth7 that others can reach" in text
    assert text.endswith("Pass --address with that of node 0, or another --interface.")
