"""`tfdp run --elastic`: lost workers are replaced, and do not end the job."""

from __future__ import annotations

import pytest

from tests.cli.launcher import DEADLINE_SECONDS, IMPATIENT, lines_of
from tests.harness.tiers import full

pytestmark = pytest.mark.processes

# Worker 1 fails once; the others end after its replacement has.
FAILS_ONCE = """
    tries = len(list(pathlib.Path(".").glob(f"try-{RANK}-*")))
    pathlib.Path(f"try-{RANK}-{tries}").touch()
    if RANK == 1 and not tries:
        FAIL
    if RANK != 1:
        wait_for("done-1")
    pathlib.Path(f"done-{RANK}").touch()
    print("done", CONFIG["tfdp"]["elastic"], len(CONFIG["cluster"]["worker"]))
"""


def test_a_lost_worker_is_replaced_while_the_others_run(launcher):
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    launcher.script(FAILS_ONCE.replace("FAIL", kill))
    result = launcher.run("--elastic", "2:3", "--log-dir", "logs", "script.py")
    assert result.returncode == 0
    for rank in range(3):
        assert lines_of(result.stdout, rank)[-1] == "done 2 3"
    assert len(list(launcher.folder.glob("try-*"))) == 4
    (line,) = (launcher.folder / "logs" / "restarts.log").read_text().splitlines()
    assert "worker 1 was killed by SIGKILL" in line
    assert "a new one takes its place (replacement 1 of 10)" in line
    assert launcher.processes() == []


@pytest.mark.parametrize(
    ("script", "replacements", "code", "words"),
    [
        (
            "sys.exit(5) if RANK == 1 else time.sleep(1.0)",
            *(0, 0, "exit code 5; it is not replaced"),
        ),
        full("sys.exit(5)", 1, 5, "no worker is left"),
        (
            "time.sleep(1.0 * RANK); sys.exit(7 * RANK)",
            *(1, 7, "others have ended without an error"),
        ),
    ],
    ids=["others succeed", "all fail", "fails after the others"],
)
def test_the_code_is_that_of_the_last_workers(
    launcher, script, replacements, code, words
):
    launcher.script(script)
    options = ("--elastic", "1:2", "--max-restarts", str(replacements))
    result = launcher.run(*options, "script.py")
    assert result.returncode == code
    assert words in result.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_too_few_workers_are_stopped_at_once(launcher, rank):
    launcher.script(f"sys.exit(5) if RANK == {rank} else time.sleep(600.0)")
    result = launcher.run("--elastic", "2:2", "--max-restarts", "1", "script.py")
    assert result.returncode == 5
    words = "exit code 5; it is not replaced, and 1 worker cannot continue alone"
    assert result.stdout.count(words) == 1
    assert "no worker is left" not in result.stdout
    assert launcher.processes() == []


# Worker 0 ends as soon as worker 1 is replaced. Both replacements outlive the check.
ENDS_BEFORE_THE_REPLACEMENT = """
    if RANK == 0:
        wait_for("replaced")
    elif not pathlib.Path("failed").exists():
        pathlib.Path("failed").touch()
        sys.exit(1)
    else:
        pathlib.Path("replaced").touch()
        REPLACEMENT
        time.sleep(20.0)
        print("done")
"""
JOINS = """
        from tfdp.communication.cluster import Cluster
        from tfdp.communication.store import Membership
        Membership(Cluster.from_environment(), generation=1).join(30.0)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("replacement", "last"), [("print('alone')", "alone"), (JOINS.strip(), "done")]
)
def test_a_replacement_is_stopped_unless_it_has_joined_the_job(
    launcher, replacement, last
):
    launcher.script(ENDS_BEFORE_THE_REPLACEMENT.replace("REPLACEMENT", replacement))
    result = launcher.run("--elastic", "1:2", "script.py")
    assert result.returncode == 0, result.stdout
    assert lines_of(result.stdout, 1)[-1] == last


WAITS_FOR_ONE_THAT_FAILS = """
    if RANK == 1:
        sys.exit(5)
    from tfdp.communication.cluster import Cluster
    from tfdp.communication.store import Membership
    Membership(Cluster.from_environment()).join(None, may_run_already=True)
"""


@pytest.mark.full
def test_a_worker_does_not_wait_for_one_that_is_not_replaced_any_more(launcher):
    launcher.script(WAITS_FOR_ONE_THAT_FAILS)
    line = ["run", "--elastic", "1:2", "--max-restarts", "1", "script.py"]
    process = launcher.python(f"{IMPATIENT}main({line!r})")
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 69
    assert "it is not replaced" in output
    assert output.count("no worker has trained for") == 1
    assert launcher.processes() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--elastic", "3:2"], "it must be MIN:MAX, such as 2:4"),
        full(["--elastic", "0:2"], "it must be MIN:MAX, such as 2:4"),
        full(["--elastic", "x"], "it must be MIN:MAX, such as 2:4"),
        (["--elastic", "1:2", "-n", "2"], "cannot be combined with -n"),
        full(
            ["--elastic", "1:2", "--rebalance"], "cannot be combined with --rebalance"
        ),
        full(["--elastic", "1:2", "--islands"], "--islands cannot be combined with"),
        full(
            ["--elastic", "1:2", "--nodes", "2", "--rendezvous", "a:1"],
            "cannot be combined with --hosts, --nodes",
        ),
    ],
)
def test_wrong_options_are_named_at_once(launcher, options, words):
    launcher.script("pass")
    result = launcher.run(*options, "script.py")
    assert result.returncode == 2
    assert words in " ".join(result.stdout.split())
