"""The faults of the tutorial's training step, each with a test of its name."""

import ast
import math

import pytest
import yaml

from tests.cloud_support import GENERATIONS, render, run_env
from tests.conftest import ROOT


def calls(name: str) -> list[dict[str, str]]:
    """Return the keyword arguments of every call of `name` in train.py, as source."""
    tree = ast.parse((ROOT / "template" / "train.py").read_text())
    return [
        {str(keyword.arg): ast.unparse(keyword.value) for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_f29_a_lost_host_is_survived_and_costs_only_the_steps_since_the_last_checkpoint() -> None:
    repository = render()
    values, config = run_env(repository), yaml.safe_load((repository / "config" / "train.yml").read_text())
    # Ray restarts the workers, and the RayJob the cluster, as often as the answer says.
    (failures,) = calls("FailureConfig")
    assert failures["max_failures"] == "run.max_failures"
    assert int(values["MAX_FAILURES"]) > 0
    job = yaml.safe_load((repository / "k8s" / "job" / "rayjob.yaml").read_text())
    assert job["spec"]["backoffLimit"] == int(values["MAX_FAILURES"])
    # A restart finds what was saved: often enough, in one place, under a name that does not change.
    assert config["enable_checkpointing"] is True
    assert 0 < config["checkpoint_period"] < config["steps"]
    assert config["base_output_directory"].startswith("gs://")
    (run,) = calls("RunConfig")
    assert run["name"] == "run.run_name"
    assert config["run_name"] == values["RUN_NAME"] == run_env(render(steps="7"))["RUN_NAME"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_f30_the_mesh_follows_the_slice_instead_of_being_typed(generation: str) -> None:
    topologies = list(GENERATIONS[generation]["topologies"])
    for topology in {topologies[0], topologies[len(topologies) // 2], topologies[-1]}:
        repository = render(generation=generation, topology=topology)
        config = yaml.safe_load((repository / "config" / "train.yml").read_text())
        sizes = [size for name, size in config.items() if name.startswith("ici_")]
        devices = int(run_env(repository)["DEVICES_PER_SLICE"])
        assert sizes.count(-1) <= 1
        given = math.prod(size for size in sizes if size != -1)
        assert given == devices or (-1 in sizes and devices % given == 0), (topology, sizes)
