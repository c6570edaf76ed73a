"""The image: what enters it, the tag that its content gives, and the build that makes it."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cloud_support import TEMPLATE, render, run_env, variant


def image_tag(repository: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "ops.image_tag", *arguments], cwd=repository, capture_output=True, text=True
    )


def image_files(repository: Path) -> list[str]:
    return image_tag(repository, "--files").stdout.split()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A rendered repository that the test may change."""
    return Path(shutil.copytree(variant("default"), tmp_path / "run"))


def test_equal_content_gives_an_equal_tag_in_any_folder(repository: Path) -> None:
    tag = image_tag(repository).stdout.strip()
    assert re.fullmatch(r"[0-9a-f]{16}", tag)
    assert image_tag(variant("default")).stdout.strip() == tag


@pytest.mark.parametrize("name", ["Dockerfile", "requirements.lock", "run.env", "train.py", "config/train.yml"])
def test_a_change_in_any_file_of_the_image_changes_the_tag(name: str, repository: Path) -> None:
    before = image_tag(repository).stdout
    with (repository / name).open("a") as file:
        file.write("\n# changed\n")
    assert image_tag(repository).stdout != before


def test_moving_text_between_files_changes_the_tag(repository: Path) -> None:
    (repository / "config/a").write_text("one")
    (repository / "config/b").write_text("two")
    before = image_tag(repository).stdout
    (repository / "config/a").write_text("onet")
    (repository / "config/b").write_text("wo")
    assert image_tag(repository).stdout != before


def test_files_outside_the_image_do_not_change_the_tag(repository: Path) -> None:
    before = image_tag(repository).stdout
    for name in ("notes.md", "ops/scratch.py", ".venv/lib/x.py"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("x")
    assert image_tag(repository).stdout == before


def test_a_missing_file_is_named_without_a_traceback(repository: Path) -> None:
    (repository / "requirements.lock").unlink()
    done = image_tag(repository)
    assert done.returncode == 1
    assert done.stderr.startswith("error: requirements.lock is missing")


@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed; CI runs this")
def test_cloud_build_uploads_exactly_the_files_of_the_tag(repository: Path) -> None:
    (repository / ".venv").mkdir()
    (repository / ".venv/secret").write_text("x")
    (repository / "config/deeper").mkdir()
    (repository / "config/deeper/file").write_text("x")
    listed = subprocess.run(
        ["gcloud", "meta", "list-files-for-upload", "."], cwd=repository, check=True, capture_output=True, text=True
    )
    assert sorted(listed.stdout.split()) == sorted(image_files(repository))


def local_imports(repository: Path, module: Path) -> set[Path]:
    """Return the files of this repository that a module imports, and what these import, relative to it."""
    found = set()
    for node in ast.walk(ast.parse((repository / module).read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            path = Path(name.replace(".", "/")).with_suffix(".py")
            if (repository / path).is_file():
                found |= {path} | local_imports(repository, path)
    return found


def test_everything_that_the_trainer_imports_is_in_the_image() -> None:
    repository = variant("default")
    needed = local_imports(repository, Path("train.py"))
    assert {path.as_posix() for path in needed} <= set(image_files(repository))


def test_everything_that_may_enter_the_image_is_copied_into_it() -> None:
    repository = variant("default")
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (repository / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source.rstrip("/") for line in copied for source in line.split()}
    for name in image_files(repository):
        assert name == "Dockerfile" or name in sources or name.split("/")[0] in sources, name


def test_nothing_secret_or_local_enters_the_image() -> None:
    assert not [name for name in image_files(variant("default")) if re.search(r"venv|\.git|answers|token|key", name)]


def test_the_image_installs_the_whole_lock_with_its_hashes_and_only_wheels() -> None:
    text = (variant("default") / "Dockerfile").read_text()
    assert "--require-hashes" in text
    assert "--only-binary=:all:" in text
    assert "pip check" in text


def test_the_image_uses_the_uv_and_python_of_the_set_up() -> None:
    docker = (TEMPLATE / "template/Dockerfile").read_text()
    setup = (TEMPLATE / "template/setup.sh").read_text()
    uv = re.search(r"^UV_PINNED=(\S+)", setup, re.MULTILINE)
    python = re.search(r"^PYTHON_VERSION=(\S+)", setup, re.MULTILINE)
    assert uv is not None
    assert python is not None
    assert f"ARG UV={uv[1]}\n" in docker
    assert re.search(rf"^ARG PYTHON={re.escape(python[1])}\.\d+-slim", docker, re.MULTILINE)


def test_f15_f16_f17_nothing_is_cloned_or_resolved_in_the_build() -> None:
    text = (variant("default") / "Dockerfile").read_text()
    assert not re.search(r"git clone|--resolution|install_maxtext", text)


def test_f18_the_image_carries_no_path_of_an_older_maxtext() -> None:
    repository = variant("default")
    for name in image_files(repository):
        if name != "requirements.lock":
            assert not re.search(r"from MaxText|src/MaxText", (repository / name).read_text()), name


def test_f20_f21_f22_no_dumps_and_no_debug_environment_in_the_image() -> None:
    text = (variant("default") / "Dockerfile").read_text()
    assert not re.search(r"XLA_FLAGS|xla_dump|TPU_SLICE_BUILDER|PJRT|JAX_PLATFORMS", text)


def test_f23_the_tag_is_never_mutable() -> None:
    for name in ("Dockerfile", "cloudbuild.yaml", "infra/image.sh"):
        assert ":latest" not in (variant("default") / name).read_text()


def test_f24_cloud_build_has_a_timeout_and_a_larger_machine() -> None:
    build = yaml.safe_load((variant("default") / "cloudbuild.yaml").read_text())
    assert build["timeout"] == "3600s"
    assert build["options"]["machineType"] == "E2_HIGHCPU_8"


def test_f35_the_image_runs_as_the_user_that_the_manifests_name() -> None:
    text = (variant("default") / "Dockerfile").read_text()
    assert "USER 1000:1000" in text
    assert "--uid 1000 --gid 1000" in text


def test_two_runs_of_one_project_differ_in_their_tag() -> None:
    assert image_tag(render(run_name="a")).stdout != image_tag(render(run_name="b")).stdout


def test_the_image_lies_in_the_registry_that_the_scripts_make() -> None:
    values = run_env(variant("default"))
    expected = f"{values['REGION']}-docker.pkg.dev/{values['PROJECT_ID']}/{values['REGISTRY']}/{values['PROJECT_NAME']}"
    assert values["IMAGE_REPOSITORY"] == expected


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run([hadolint, str(variant("default") / "Dockerfile")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
