"""`tfdp run` imports TensorFlow once, and its workers cannot tell."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import sys
import textwrap

import pytest

from tests.cli.launcher import ROOT, STOPS_WITHIN_SECONDS, Launcher, lines_of
from tests.harness.tiers import full
from tfdp.launch.cli.import_once import fork_server
from tfdp.launch.cli.import_once.script import Imports, imports_of
from tfdp.launch.cli.signals import SignalPipe

pytestmark = pytest.mark.processes

TENSORFLOW = ["tensorflow", "keras"]
# In place of TensorFlow, which takes seconds: notes which process imports it.
FAKE = """
import os, sys, threading, time
import numpy
os.environ.setdefault("SET_BY_IMPORT", "1")
print("import with", os.environ.get("TF_LEVEL"), flush=True)
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
exec(os.environ.get("AT_IMPORT", ""))
"""
# All that a script may look at and that a fork could have changed.
FACTS = """
import faulthandler, inspect, multiprocessing, os, resource, signal, subprocess, sys
import threading
print(sorted(name for name in ("tensorflow", "keras") if name in sys.modules))
print(os.environ.get("SET_BY_IMPORT"))
import tensorflow as tf
import keras
print(sys.modules["tensorflow"] is tf, tf.__spec__.origin, keras.__spec__.loader)
print(sorted(os.environ.items() - {("TF_CONFIG", os.environ["TF_CONFIG"])}))
print(__name__, __file__, __spec__, __package__, sorted(globals()))
print(getattr(__loader__, "path", None))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, os.getcwd(), sys.executable)
print(open("/proc/self/cmdline").read().split("\\0"))
print(sys.stdin.read(), sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.name)
print(sorted(os.listdir("/proc/self/fd")), os.getsid(0) == os.getpid())
print({s: signal.getsignal(s) for s in signal.valid_signals() if s < 30})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(sys.excepthook is sys.__excepthook__, sorted(os.sched_getaffinity(0)))
print(threading.active_count(), threading.current_thread() is threading.main_thread())
print([resource.getrlimit(kind) for kind in range(10)])
print(len(inspect.stack()), sys.modules["__main__"].__dict__ is globals())
faulthandler.dump_traceback()

def square(x):
    return x * x

if __name__ == "__main__":
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(square, [2, 3]))
    code = "import os, sys; print(sys.path, os.environ.get('PYTHONPATH'))"
    subprocess.run([sys.executable, "-c", code], check=True)
    if "raise" in sys.argv:
        raise ValueError("of the script")
    sys.exit(int(sys.argv[1]))
"""
IMPORTS_FOR_ITSELF = """
import tensorflow
own = str(os.getpid()) in open(os.environ["IMPORTS"]).read().split()
print("imported by", "itself" if own else "another")
"""


@pytest.fixture
def fakes(launcher) -> Launcher:
    """A launcher whose workers find packages that are imported in no time."""
    for name in TENSORFLOW:
        folder = launcher.folder / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(FAKE if name == "tensorflow" else "")
    launcher.environment |= {
        "PYTHONPATH": f"{launcher.folder / 'packages'}{os.pathsep}{ROOT}",
        "IMPORTS": str(launcher.folder / "imports"),
    }
    return launcher


def imports(fakes: Launcher) -> list[int]:
    return [int(line) for line in (fakes.folder / "imports").read_text().split()]


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("import tensorflow", {}),
        ("import numpy\nfrom keras import layers", {}),
        ("try:\n    import keras\nexcept ImportError:\n    pass", {}),
        ("def main():\n    import tensorflow\n\nmain()", {}),
        ("import os\nprint(os.environ['HOME'])\nimport keras", {}),
        ("import os\nprint(os.environ.get('A'), 'A' in os.environ)\nimport keras", {}),
        ("import os\nos.environ['A'] = 'b'\nimport keras", {"A": "b"}),
        ("import os\nos.environ.setdefault('A', 'b')\nimport keras", {"A": "b"}),
        ("import os\nos.environ.setdefault('HOME', 'b')\nimport keras", {}),
        ("import keras, os\nos.environ['A'] = str(1)", {}),
        ("import local\nimport keras", {"LOCAL": "1"}),
        ("import package.part\nimport keras", {"PART": "1"}),
        ("import os\nos.environ['A'] = str(1)\nimport keras", None),
        ("import os\nif 1:\n    os.environ['A'] = 'b'\nimport keras", None),
        ("import os\ndef f():\n    os.environ['A'] = 'b'\nimport keras", None),
        ("import os\nos.environ.update(A='b')\nimport keras", None),
        ("import os\nos.putenv('A', 'b')\nimport keras", None),
        ("import os\nchange(os.environ)\nimport keras", None),
        ("from os import environ\nenviron.pop('A')\nimport keras", None),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport keras", None),
        ("import changing\nimport keras", None),
        ("def f():\n    import local\n\nimport keras", None),
        (
            "import os\ndef f():\n    import uses\n\n"
            "os.environ['A'] = 'b'\nimport keras",
            {"A": "b"},
        ),
        ("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras", None),
        ("import numpy", None),
        ("import torch", None),
    ],
)
def test_what_a_script_sets_before_it_imports_tensorflow(tmp_path, source, variables):
    (tmp_path / "local.py").write_text("import os\nos.environ['LOCAL'] = '1'")
    (tmp_path / "changing.py").write_text("import os\nos.environ.update(A='b')")
    (tmp_path / "uses.py").write_text("import tensorflow")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    part = "from os import environ\nenviron['PART'] = '1'"
    (tmp_path / "package" / "part.py").write_text(part)
    script = tmp_path / "script.py"
    script.write_text(source)
    expected = None if variables is None else Imports(TENSORFLOW, variables)
    assert imports_of(str(script)) == expected


def test_tfdp_is_imported_too_where_the_script_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import keras\n\ndef train():\n    import tfdp.callbacks")
    assert imports_of(str(script)) == Imports([*TENSORFLOW, "tfdp"], {})


@pytest.mark.parametrize(("end", "code"), [full("raise", 1), ("0", 0), full("7", 7)])
def test_a_worker_sees_what_it_would_see_by_itself(fakes, end, code):
    (fakes.folder / "script.py").write_text(FACTS)
    seen = {}
    for option in ("--fork", "--no-fork"):
        logs = f"logs{option}"
        # Of one worker: of two the one that ends first stops the other.
        options = ["-n", "1", "--max-restarts", "1", "--log-dir", logs, option]
        done = fakes.run(*options, "script.py", end)
        assert done.returncode == code, done.stdout
        text = (fakes.folder / logs / "worker-0.log").read_text()
        seen[option] = re.sub(r"0x[0-9a-f]+|\b\d{3,}\b", "N", text).splitlines()
    print("\n".join(difflib.unified_diff(*seen.values(), lineterm="")))
    assert seen["--fork"] == seen["--no-fork"]
    times = 1 if code == 0 else 2
    # The copy of a spawned pool imports by itself in any case.
    assert len(imports(fakes)) == 1 + times + 2 * times


def test_the_workers_of_all_attempts_are_forks_of_one(fakes):
    fakes.script(
        f"""
        {textwrap.indent(IMPORTS_FOR_ITSELF, " " * 8).strip()}
        pathlib.Path(f"was-{{RANK}}-{{CONFIG['tfdp']['job']}}").touch()
        again = pathlib.Path("again")
        if RANK == 1 and not again.exists():
            again.touch()
            sys.exit(3)
        """
    )
    done = fakes.run("-n", "2", "--max-restarts", "1", "script.py")
    assert done.returncode == 0, done.stdout
    assert "imported by itself" not in done.stdout
    assert len(imports(fakes)) == 1
    fakes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


@pytest.mark.parametrize(
    ("options", "environment", "begin"),
    [
        (["--no-fork"], {}, ""),
        ([], {}, "os.environ['A'] = str(1)"),
        full([], {"COVERAGE_PROCESS_START": "none"}, ""),
        full(
            [],
            {"AT_IMPORT": "threading.Thread(target=time.sleep, args=(2,)).start()"},
            "",
        ),
        full([], {"AT_IMPORT": "if sys.path[0] != os.getcwd(): raise ImportError"}, ""),
        full([], {"CUDA_VISIBLE_DEVICES": ""}, "import shadowed"),
    ],
    ids=["option", "environment", "coverage", "thread", "error", "shadow"],
)
def test_each_worker_imports_for_itself_where_a_fork_would_differ(
    fakes, options, environment, begin
):
    fakes.environment |= environment
    if begin == "import shadowed":
        (fakes.folder / "shadowed.py").write_text("")
        # A package of TensorFlow's that the script's folder has, too.
        (fakes.folder / "packages" / "shadowed.py").write_text("")
        fakes.environment["AT_IMPORT"] = "import shadowed"
    fakes.script(f"{begin}\n{IMPORTS_FOR_ITSELF}")
    done = fakes.run("-n", "2", *options, "script.py")
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert "imported by itself" in lines_of(done.stdout, rank)


@pytest.mark.full
def test_a_module_is_imported_for_itself(fakes):
    fakes.script(IMPORTS_FOR_ITSELF)
    done = fakes.run("-n", "2", "-m", "script")
    assert done.returncode == 0, done.stdout
    assert len(imports(fakes)) == 2


def test_variables_of_the_script_are_set_where_it_is_imported(fakes):
    begin = "import os\nos.environ['TF_LEVEL'] = '3'"
    (fakes.folder / "script.py").write_text(f"{begin}\n{IMPORTS_FOR_ITSELF}")
    done = fakes.run("-n", "2", "script.py")
    for rank in range(2):
        lines = lines_of(done.stdout, rank)
        assert lines == ["import with 3", "imported by another"], done.stdout


@pytest.mark.full
def test_a_variable_that_cannot_be_foreseen_is_named(fakes):
    fakes.script("exec(\"os.environ['TF_LEVEL'] = '3'\")\nimport tensorflow")
    done = fakes.run("-n", "2", "script.py")
    assert done.stdout.count("imported TensorFlow before the script set TF_LEVEL") == 2
    assert "script.py:9" in done.stdout, done.stdout


@pytest.mark.full
def test_a_module_of_a_package_imports_the_package(fakes):
    part = fakes.folder / "packages" / "tensorflow" / "part.py"
    part.write_text("value = 1")
    fakes.environment["AT_IMPORT"] = "import tensorflow.part"
    fakes.script(
        """
        print("tensorflow.part" in sys.modules, os.environ.get("SET_BY_IMPORT"))
        from tensorflow.part import value
        print("tensorflow" in sys.modules, os.environ.get("SET_BY_IMPORT"), value)
        """
    )
    done = fakes.run("-n", "2", "script.py")
    expected = ["False None", "import with None", "True 1 1"]
    assert lines_of(done.stdout, 1) == expected, done.stdout
    assert len(imports(fakes)) == 1


@pytest.mark.full
def test_a_variable_that_is_set_after_the_import_is_not_too_late(fakes):
    fakes.script("import tensorflow\nos.environ['TF_LEVEL'] = '3'\nimport keras")
    done = fakes.run("-n", "2", "script.py")
    assert done.returncode == 0
    assert len(imports(fakes)) == 1
    assert "may have no effect" not in done.stdout


def test_a_suspended_parent_is_not_waited_for(fakes, monkeypatch):
    monkeypatch.setattr(fork_server, "_FORK_SECONDS", 0.2)
    fakes.script("import tensorflow")
    script = str(fakes.folder / "script.py")
    own = fork_server.ForkServer(
        [sys.executable, script], TENSORFLOW, fakes.environment
    )
    with contextlib.closing(own), contextlib.closing(SignalPipe()) as signals:
        assert own.wait(signals)
        os.kill(own.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError), open(os.devnull, "wb") as output:
            own.fork(fakes.environment, output.fileno())


def test_workers_draw_random_numbers_of_their_own(fakes):
    fakes.script(
        """
        import random
        import tensorflow, numpy
        print("drew", random.random(), numpy.random.rand())
        """
    )
    done = fakes.run("-n", "2", "script.py")
    drawn = [line.split()[-2:] for line in done.stdout.splitlines() if "drew" in line]
    assert len({number for each in drawn for number in each}) == 4, done.stdout


@pytest.mark.full
def test_ctrl_c_ends_the_import(fakes):
    fakes.environment["AT_IMPORT"] = "time.sleep(600)"
    fakes.script("import tensorflow")
    process = fakes.start("-n", "2", "script.py")
    fakes.wait_for("imports")
    process.send_signal(signal.SIGINT)
    assert process.wait(STOPS_WITHIN_SECONDS) == 130
    fakes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


def test_the_timeout_ends_the_import(fakes):
    fakes.environment["AT_IMPORT"] = "time.sleep(600)"
    fakes.script("import tensorflow")
    assert fakes.run("-n", "2", "--timeout", "1", "script.py").returncode == 124
    fakes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


def test_workers_import_for_themselves_once_the_one_that_forks_has_ended(fakes):
    fakes.script(
        """
        import tensorflow
        parent, *others = open(os.environ["IMPORTS"]).read().split()
        if RANK == 0 and not others:
            os.kill(int(parent), signal.SIGKILL)
            sys.exit(3)
        print("done")
        """
    )
    done = fakes.run("-n", "2", "--max-restarts", "1", "script.py")
    assert done.returncode == 0, done.stdout
    assert len(imports(fakes)) == 3
    fakes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


def test_a_launcher_that_is_killed_leaves_nothing(fakes):
    fakes.script(
        """
        import tensorflow
        pathlib.Path(f"ready-{RANK}").touch()
        time.sleep(600)
        """
    )
    process = fakes.start("-n", "2", "script.py")
    fakes.wait_for("ready-0", "ready-1")
    process.kill()
    process.wait()
    fakes.assert_nothing_is_left(within_seconds=STOPS_WITHIN_SECONDS)


@pytest.mark.full
def test_two_forked_workers_train_as_two_that_import_for_themselves(launcher):
    (launcher.folder / "script.py").write_text(
        textwrap.dedent(
            """
            import keras
            import tfdp

            keras.utils.set_random_seed(1)
            strategy = tfdp.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile("adam", "mse")
            x = keras.random.normal((32, 4), seed=1).numpy()
            history = model.fit(x, x[:, :1], epochs=2, verbose=0).history
            print("loss", history["loss"], strategy.num_replicas_in_sync)
            """
        )
    )
    told = []
    for option in ("--fork", "--no-fork"):
        # Two workers that each import TensorFlow take long beside other tests.
        done = launcher.run("-n", "2", option, "script.py", deadline_seconds=120)
        assert done.returncode == 0, done.stdout
        told.append([line for line in lines_of(done.stdout, 0) if "loss" in line])
    assert told[0] == told[1] != []
