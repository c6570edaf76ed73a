"""The tables against what Google's, Ray's and MaxText's own code says."""

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

# Rows checked against GKE's machine table, Ray, MaxText and libtpu, one a (generation, topology).
CHECKED = yaml.safe_load((Path(__file__).parent / "data" / "slices.yml").read_text())


def rows(facts: Any) -> list[Any]:
    return [facts.slice_of(g, t) for g in facts.GENERATIONS for t in facts.topologies(g)]


def test_every_row_is_offered_and_derived_as_checked(questionnaire: ModuleType) -> None:
    derived = {
        f"{row.generation} {row.topology}": [
            row.machine_type,
            row.hosts,
            row.chips_per_host,
            row.chips,
            row.devices_per_host,
            row.devices,
            row.gke_env,
            row.ray_pod_type,
            row.compile_topology,
        ]
        for row in rows(questionnaire.facts)
    }
    assert derived == CHECKED["slices"]


@pytest.mark.parametrize("name", CHECKED["generations"])
def test_names_and_figures_of_a_generation_are_as_checked(name: str, questionnaire: ModuleType) -> None:
    record = questionnaire.facts.GENERATIONS[name]
    for key, value in CHECKED["generations"][name].items():
        assert record[key] == value, key


def test_two_by_four_is_only_offered_on_the_eight_chip_machine(questionnaire: ModuleType) -> None:
    for generation in ("v5e", "v6e"):
        row = questionnaire.facts.slice_of(generation, "2x4")
        assert (row.chips_per_host, row.hosts) == (8, 1)
        assert row.machine_type.endswith("-8t")


def test_every_default_topology_and_zone_is_offered(questionnaire: ModuleType) -> None:
    for name, record in questionnaire.facts.GENERATIONS.items():
        assert record["default_topology"] in record["topologies"], name
        assert questionnaire.facts.slice_of(name, record["default_topology"]).multi_host, name
        for zone in record["zones"]:
            assert questionnaire.rules.zone(zone, {"generation": name}) == ""
        assert sum(machine["multi_host"] for machine in record["machines"]) == 1, name


RAY_PROBE = """
import json, sys
from ray.util import tpu
from ray._private.accelerators.tpu import TPUAcceleratorManager, infer_tpu_pod_type_from_topology
answer = []
for row in json.load(sys.stdin):
    kind = row["ray_accelerator_type"]
    workers, resources = tpu.get_tpu_worker_resources(
        topology=row["topology"], accelerator_type=kind, num_slices=1,
        resources_per_worker={"TPU": row["chips_per_host"]},
    )
    answer.append([
        TPUAcceleratorManager.is_valid_tpu_accelerator_topology(
            tpu.get_tpu_version_from_type(kind), row["topology"]
        ),
        infer_tpu_pod_type_from_topology(row["topology"], kind),
        workers,
        tpu.get_tpu_num_slices_for_workers(
            topology=row["topology"], accelerator_type=kind, num_workers=row["hosts"],
            resources_per_worker={"TPU": row["chips_per_host"]},
        ),
    ])
print(json.dumps(answer))
"""

MAXTEXT_PROBE = """
import json, sys
from maxtext.utils.accelerator_to_spec_map import get_system_characteristics
answer = []
for name in json.load(sys.stdin):
    spec = get_system_characteristics(name)
    answer.append([spec.topology_name, spec.devices_per_slice] if spec else None)
print(json.dumps(answer))
"""


def probe(python: Path, code: str, question: Any) -> Any:
    done = subprocess.run([python, "-c", code], input=json.dumps(question), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ray_accepts_every_slice_and_counts_its_hosts_alike(questionnaire: ModuleType, run_python: Path) -> None:
    table = rows(questionnaire.facts)
    answer = probe(run_python, RAY_PROBE, [row._asdict() for row in table])
    assert answer == [[True, row.ray_pod_type, row.hosts, 1] for row in table]


def test_maxtext_compiles_for_every_slice_and_counts_its_devices_alike(
    questionnaire: ModuleType, run_python: Path
) -> None:
    table = rows(questionnaire.facts)
    answer = probe(run_python, MAXTEXT_PROBE, [row.compile_topology for row in table])
    for row, spec in zip(table, answer, strict=True):
        shape = row.topology if row.topology.count("x") == 2 else f"{row.topology}x1"
        assert spec is not None, row.compile_topology
        assert spec[0].split(":")[1] in (row.topology, shape), row.compile_topology
        assert spec[1] == row.devices, row.compile_topology
