"""`examples/multi_worker` and `docs/multi_worker.md`, with workers that are real processes."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.waiting import SECONDS_TO_HANG
from sklearn.datasets import load_digits

import mirrax as mx
from mirrax._src.cluster.local_cluster import free_ports

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "examples" / "multi_worker" / "main.py"
PAGE = (ROOT / "docs" / "multi_worker.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EPOCHS = 6

# Runs the example as it is, and keeps what this worker has then. With `KILLS` the first worker
# kills itself in the first attempt, the second one in the second, after a new checkpoint. The
# images come from a file: importing scikit-learn takes each process longer than training.
WRAPPER = """
import json, os, runpy, signal, sys, threading, time, types
from pathlib import Path
import numpy as np

def saved():
    return {path.name for path in Path(os.environ["SAVED"]).glob("ckpt-*")}

def kill_when_saved(before):
    while not saved() - before:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
attempt = int(os.environ["MIRRAX_ATTEMPT"])
if worker == attempt < int(os.environ.get("KILLS", "0")):
    threading.Thread(target=kill_when_saved, args=(saved(),), daemon=True).start()
images = types.SimpleNamespace(**np.load(os.environ["DIGITS"]))
sys.modules["sklearn.datasets"] = types.SimpleNamespace(load_digits=lambda: images)
del sys.argv[0]
sys.path.insert(0, os.environ["EXAMPLE"])
variables = runpy.run_path(sys.argv[0])["multi_worker_model"].trainable_variables
np.savez(f"weights-{worker}.npz", *[v.numpy() for v in variables])
"""


def environment(**more: object) -> dict[str, str]:
    """This one and some more, with errors for warnings."""
    added = {"PYTHONPATH": ROOT, "PYTHONWARNINGS": "error"} | more
    return os.environ | {name: str(value) for name, value in added.items()}


def finish(process: subprocess.Popen[str]) -> str:
    """What a process has printed when it has ended well."""
    try:
        printed, _ = process.communicate(timeout=SECONDS_TO_HANG)
    except subprocess.TimeoutExpired:
        process.kill()  # what a launcher has started ends with it
        printed, _ = process.communicate()
        pytest.fail(f"{process.args} did not end in {SECONDS_TO_HANG} s:\n{printed}")
    assert process.returncode == 0, printed
    return printed


def start(
    command: list[str], directory: Path, **variables: object
) -> subprocess.Popen[str]:
    directory.mkdir(exist_ok=True)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=environment(**variables),
    )


def mirrax_run(
    directory: Path, *arguments: object, workers: int = 2, restarts: int = 0, **env: Any
) -> str:
    command = [sys.executable, "-m", "mirrax", "run", "--workers", workers]
    command += ["--devices-per-worker", 1, "--max-restarts", restarts, *arguments]
    return finish(start([str(each) for each in command], directory, **env))


def run_example(
    directory: Path,
    main: Path = MAIN,
    epochs: int = EPOCHS,
    batch: int = 64,
    **how: Any,
) -> str:
    directory.mkdir(exist_ok=True)
    wrapper = directory / "wrapper.py"
    wrapper.write_text(WRAPPER)
    options = ("--per-worker-batch-size", batch, "--directory", directory / "saved")
    digits: Any = load_digits()
    np.savez(directory / "digits.npz", images=digits.images, target=digits.target)
    how |= {"SAVED": directory / "saved", "EXAMPLE": MAIN.parent}
    how |= {"DIGITS": directory / "digits.npz"}
    return mirrax_run(directory, wrapper, main, "--epochs", epochs, *options, **how)


def weights_of(worker: int, directory: Path) -> list[np.ndarray]:
    with np.load(directory / f"weights-{worker}.npz") as arrays:
        return list(arrays.values())


def assert_same_bits(mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert [a.tobytes() for a in mine] == [a.tobytes() for a in theirs]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two workers that nobody has disturbed: its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("trained")
    return directory, run_example(directory)


def test_the_example_learns_with_equal_weights_on_all_workers(
    trained: tuple[Path, str],
) -> None:
    directory, printed = trained
    for worker in range(2):
        line = rf"worker {worker} \| Epoch: (\d), accuracy: ([\d.]+), train_loss: ([\d.]+)\."
        found = [tuple(map(float, each)) for each in re.findall(line, printed)]
        epochs, accuracies, losses = zip(*found)
        assert epochs == tuple(range(EPOCHS))
        assert accuracies[-1] > 0.95 and losses[-1] < losses[0] / 5
    assert_same_bits(weights_of(1, directory), weights_of(0, directory))
    assert os.listdir(directory / "saved") == [f"ckpt-{EPOCHS}"]


def test_two_workers_end_with_the_weights_of_one(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    run_example(tmp_path, workers=1, batch=128)
    for mine, theirs in zip(weights_of(0, tmp_path), weights_of(0, trained[0])):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


# The tutorial's helpers for workers that all write, each into a place of its own.
TEMPORARY = """
import shutil

def _is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)

def write_filepath(filepath, task_type, task_id):
    dirpath, base = os.path.split(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = os.path.join(dirpath, f"workertemp_{task_id}")
        os.makedirs(dirpath, exist_ok=True)
    return os.path.join(dirpath, base)

task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
"""
CLEANUP = """    checkpoint_manager.save()
    if not _is_chief(task_type, task_id):
        shutil.rmtree(write_checkpoint_dir)
"""


def with_temporary_directories() -> str:
    """The example, with the tutorial's way to save."""
    text = MAIN.read_text()
    for old, new in [
        ("\ncheckpoint = mx", f"{TEMPORARY}\ncheckpoint = mx"),
        ("directory=checkpoint_dir", "directory=write_checkpoint_dir"),
        ("    checkpoint_manager.save()\n", CLEANUP),
    ]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def test_killed_workers_cost_no_bit_and_temporary_directories_do_no_harm(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    main = tmp_path / "main.py"
    main.write_text(with_temporary_directories())
    printed = run_example(tmp_path, main, restarts=2, KILLS=2)
    for victim in range(2):
        line = rf"mirrax: restart {victim + 1} of 2 .* because worker {victim} ended: .*SIGKILL"
        assert re.search(line, printed), printed
    for worker in range(2):
        line = rf"^worker {worker} \| Restored {tmp_path}/saved/ckpt-(\d)\.$"
        first, second = re.findall(line, printed, re.MULTILINE)
        assert "0" < first < second
        assert_same_bits(weights_of(worker, tmp_path), weights_of(worker, trained[0]))
    assert os.listdir(tmp_path / "saved") == [f"ckpt-{EPOCHS}"]
    assert os.listdir(tmp_path / "workertemp_1") == []


def test_the_pages_examples_run_on_two_workers(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(BLOCKS))
    mirrax_run(tmp_path, "page.py", CHECKPOINTS=tmp_path / "saved")
    assert mx.train.latest_checkpoint(tmp_path / "saved") is not None


def test_the_pages_commands_start_two_workers_by_hand(tmp_path: Path) -> None:
    commands = re.findall(r"^    host-[ab]\$ (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    (tmp_path / "train.py").write_text(BLOCKS[0])
    ports = free_ports(2)
    processes = []
    for command in commands:
        for host, port in zip("ab", ports):
            command = command.replace(f"host-{host}:12345", f"127.0.0.1:{port}")
        command = command.replace("python", f"exec {sys.executable}")
        processes.append(start(["bash", "-c", command], tmp_path))
    try:
        printed = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert "epoch 9: loss 0.0000" in printed[0] and "epoch" not in printed[1]


def block_with(text: str) -> str:
    (found,) = [block for block in BLOCKS if text in block]
    return found


def test_the_page_finds_a_slurm_step(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    script = f"""
import mirrax as mx
{block_with("SlurmClusterResolver()").replace("Resolver()", f"Resolver(port_base={port})")}
strategy = mx.distribute.MultiWorkerMirroredStrategy(find_cluster())
print(strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync)
"""
    (tmp_path / "step.py").write_text(script)
    step = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": 2, "JAX_NUM_CPU_DEVICES": 1}
    command = [sys.executable, "step.py"]
    processes = [
        start(command, tmp_path, SLURM_PROCID=n, SLURM_LOCALID=n, **step)
        for n in range(2)
    ]
    try:
        printed = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [f"\n{n} 2\n" in f"\n{text}" for n, text in enumerate(printed)] == [True] * 2


def test_the_page_finds_pods_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    def pod(name: str, host: str) -> Any:
        status = types.SimpleNamespace(phase="Running", host_ip=host)
        metadata = types.SimpleNamespace(name=name)
        return types.SimpleNamespace(status=status, metadata=metadata)

    def list_pods(label_selector: str) -> Any:
        assert label_selector == "job-name=train"
        pods = [pod("train-1-x", "10.0.0.2"), pod("train-0-y", "10.0.0.1")]
        return types.SimpleNamespace(items=pods)

    fake: Any = types.ModuleType("kubernetes")
    api = types.SimpleNamespace(list_pod_for_all_namespaces=list_pods)
    fake.client = types.SimpleNamespace(CoreV1Api=lambda: api)
    fake.config = types.SimpleNamespace(load_incluster_config=lambda: None)
    monkeypatch.setitem(sys.modules, "kubernetes", fake)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    names: dict[str, Any] = {"mx": mx, "os": os}
    exec(block_with("KubernetesClusterResolver("), names)
    resolver = names["find_pods"]()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470"]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_the_pages_test_passes() -> None:
    names: dict[str, Any] = {}
    exec(block_with("run_workers"), names)
    names["test_all_devices_are_used"]()


def test_every_name_on_the_page_exists() -> None:
    names = set(re.findall(r"\bmx((?:\.\w+)+)", PAGE))
    assert len(names) > 15
    for name in names:
        functools.reduce(getattr, name.split(".")[1:], mx)
