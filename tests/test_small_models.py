"""Every offered model trains in small: the long proof behind the four rehearsals of `make test`."""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT, Render

PREPARE = """
from pathlib import Path
from ops import rehearse
rehearse.write_data(Path("data"), 1, 8 * 32 * 16)
"""


@pytest.mark.sweep
def test_every_offered_model_trains_in_small(render: Render, run_python: Path, questionnaire: ModuleType) -> None:
    folder = render()
    subprocess.run([run_python, "-c", PREPARE], cwd=folder, check=True)
    models = list(questionnaire.facts.MODELS)
    done = subprocess.run(
        [run_python, ROOT / "tests" / "small_models_program.py", folder / "data" / "*.parquet", *models],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    told = dict(line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("MODEL "))
    assert told == dict.fromkeys(models, "ok"), done.stderr[-2000:]
