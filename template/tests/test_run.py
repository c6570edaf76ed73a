"""What this run promises in run.env is what config/ makes MaxText do."""

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ops import run_env

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run() -> run_env.RunEnv:
    return run_env.load(ROOT / "run.env")


@pytest.fixture(scope="module")
def config(run: run_env.RunEnv) -> Any:
    """config/train.yml as MaxText itself reads it, for the devices of the slice."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxtext.configs import pyconfig

    return pyconfig.initialize(
        [
            "train.py",
            str(ROOT / "config/train.yml"),
            "hardware=cpu",
            "jax_cache_dir=",  # the real one is in the bucket
            "log_config=false",
            f"compile_topology={run.compile_topology}",
            f"compile_topology_num_slices={run.num_slices}",
        ]
    )


def test_the_counts_of_a_slice_agree(run: run_env.RunEnv) -> None:
    assert run.hosts_per_slice * run.chips_per_host == run.chips_per_slice
    assert run.hosts_per_slice * run.devices_per_host == run.devices_per_slice


def test_maxtext_trains_the_model_for_the_steps_under_the_name(run: run_env.RunEnv, config: Any) -> None:
    assert (config.model_name, config.steps, config.run_name) == (run.model, run.steps, run.run_name)


def test_checkpoints_go_straight_to_the_bucket(run: run_env.RunEnv, config: Any) -> None:
    assert config.enable_checkpointing
    assert config.checkpoint_dir.startswith(f"gs://{run.bucket}/{run.project_name}/{run.run_name}/")


def test_a_checkpoint_is_written_before_the_last_step(run: run_env.RunEnv, config: Any) -> None:
    assert config.checkpoint_period <= run.steps


def test_maxtext_expects_the_devices_of_the_slices(run: run_env.RunEnv, config: Any) -> None:
    assert config.num_target_devices == run.num_devices


def test_every_libtpu_flag_is_a_flag_and_stands_once() -> None:
    lines = (ROOT / "config/libtpu.flags").read_text().splitlines()
    flags = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"--[a-z0-9_]+(=\S*)?", flag) for flag in flags)
    names = [flag.partition("=")[0] for flag in flags]
    assert len(names) == len(set(names))


def test_ray_maxtext_and_jax_are_the_locked_ones() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    for package in ["ray", "maxtext", "jax"]:
        assert f"\n{package}=={importlib.metadata.version(package)} " in lock
