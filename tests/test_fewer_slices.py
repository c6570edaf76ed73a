"""A run that goes on with fewer slices (min_slices): what the trainer, the waits and the views make of them."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cloud_support import render

ELASTIC = {"generation": "v5p", "topology": "2x2x2", "num_slices": "2", "min_slices": "1"}


def call(python: Path, code: str, *arguments: str, **answers: str) -> str:
    """Run `code` with the ops of a rendered repository and return what it prints, errors included."""
    done = subprocess.run(
        [python, "-c", code, *arguments],
        cwd=render(**answers),
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.stdout


# Four devices are here. Ray Train's context and MaxText's trainer are stand-ins: they need a cluster.
TRAIN = """
import sys, types
import ray.train.collective
import train
workers, devices = int(sys.argv[1]), [int(count) for count in sys.argv[2].split(",")]
context = types.SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: workers)
ray.train.get_context = lambda: context
ray.train.collective.barrier = lambda: None
trainer = types.ModuleType("maxtext.trainers.pre_train.train")
trainer.main = lambda arguments: print("compiled_trainstep_file=train.py" in arguments)
sys.modules.update({"maxtext.trainers.pre_train": types.ModuleType("pre_train"), trainer.__name__: trainer})
train.train_on_host({
    "config": "steps: 8", "overrides": [], "kept_step": "train.py", "devices_per_host": 4, "devices": devices,
})
"""


def test_a_kept_step_is_used_on_all_slices_only(run_python: Path) -> None:
    assert call(run_python, TRAIN, "1", "4").splitlines()[-1] == "True"
    fewer = call(run_python, TRAIN, "1", "4,8").splitlines()
    assert "note: training on 4 of 8 devices, so a step has fewer tokens" in fewer
    assert fewer[-1] == "False"


@pytest.mark.parametrize(("workers", "devices"), [("1", "8,12"), ("2", "4,8")])
def test_the_trainer_refuses_devices_that_no_number_of_whole_slices_has(
    workers: str, devices: str, run_python: Path
) -> None:
    printed = call(run_python, TRAIN, workers, devices)
    promised = devices.replace(",", " or ")
    assert f"sees 4 of its devices and 4 in all, but run.env promises 4 and {promised}: wrong topology" in printed


WAIT = """
from ops import hosts, run_env
run = run_env.load()
hosts.POLL_SECONDS, hosts.REST_MINUTES = 0.01, 0.001
def node(slice_id, worker_id):
    labels = {"ray.io/tpu-slice-name": f"slice-{slice_id}", "ray.io/tpu-worker-id": str(worker_id)}
    resources = {f"accelerator_type:{run.ray_accelerator_type}": 1.0}
    return {"Alive": True, "NodeID": "id", "Labels": labels, "Resources": resources}
hosts.ray.nodes = lambda: [node(0, 0), node(0, 1), node(1, 1)]
print(hosts.missing(run, 1) == "", hosts.missing(run, 2))
try:
    hosts.wait(run, 0.001)
    print("starts")
except TimeoutError as error:
    print("gives up:", error)
"""
GAP = "3 of 4 v5p-16 hosts have joined Ray: slice-1 lacks host 0"


def test_a_run_waits_for_all_slices_and_starts_with_those_that_are_enough(run_python: Path) -> None:
    elastic = call(run_python, WAIT, **ELASTIC).splitlines()
    assert elastic == [
        f"True {GAP}",
        f"waiting for hosts: {GAP}",
        f"note: starts without them: waited 0.001 min, but only {GAP}",
        "starts",
    ]
    rigid = call(run_python, WAIT, **ELASTIC | {"min_slices": "0"}).splitlines()
    assert rigid[-1] == f"gives up: waited 0.001 min, but only {GAP}"


VIEW = """
import types
from ops import run_env, runs, terminal
job = types.SimpleNamespace(entrypoint="python train.py steps=100", submission_id="pilot-1")
view = runs.View(run_env.load(), job, terminal.Progress())
view.progress.update = lambda *shown: print(*shown, sep="|")
step = "completed step: {}, seconds: 1.0, TFLOP/s/device: 45.9, Tokens/s/device: 1000.0, x, loss: 2.5, lm_loss: 1"
for devices, number in ((16, 0), (8, 1), (16, 2)):
    view.line(f"Num_devices: {devices}, shape (1, {devices})")
    view.line(step.format(number))
"""


def test_the_progress_line_counts_the_devices_of_the_slices_that_train(run_python: Path) -> None:
    lines = call(run_python, VIEW, **ELASTIC).splitlines()
    shown = [line.split("|")[1] for line in lines if "|" in line]
    assert shown == [
        "compiling the step",
        "step 1/100  loss 2.500  16,000 tokens/s  MFU 10.0 %  2 min left",
        "step 2/100  loss 2.500  8,000 tokens/s  MFU 10.0 %  2 min left  1 of 2 slices",
        "step 3/100  loss 2.500  16,000 tokens/s  MFU 10.0 %  2 min left",
    ]


VERDICT = """
from ops import run_env, verdict
from ops.rehearsed_start import Attempt, Start
def told(*attempts):
    start = Start(-9, [], set(), {}, [], "", [Attempt(*attempt) for attempt in attempts])
    print(*(f"{check.passed}: {check.seen}" for check in verdict.elastic_checks(run_env.load(), start)), sep="\\n")
told((16, [], [0, 1, 2, 3, 4, 5]), (8, [0, 4], [5, 6, 7, 8, 9]), (16, [4, 8], [9]))
told((16, [], [0, 1, 2, 3, 4, 5]), (8, [0, 4], []), (8, [0, 4], [6]))
told()
"""


def test_the_verdict_on_a_lost_slice_claims_only_what_was_seen(run_python: Path) -> None:
    assert call(run_python, VERDICT, **ELASTIC).splitlines() == [
        "True: steps: 6 on 16 devices, then 5 on 8 devices, then 1 on 16 devices",
        "True: 16 of 16 devices at the end",
        "True: went on with step 5 after checkpoint 4; went on with step 9 after checkpoint 8",
        "True: steps: 6 on 16 devices, then 1 on 8 devices",
        "False: 8 of 16 devices at the end",
        "False: went on with step 6 after checkpoint 4",
        "False: steps: none",
        "False: no of 16 devices at the end",
        "False: never",
    ]
