"""Wall time and memory of preflight, against MaxText's bare train_compile of the same step; and from the cache.

The step is that of the default answers with two layers: the same mesh, flags and kernels, compiled in a minute or two.
"""

import os
import shutil
import time

from rehearsal import peak_of
from rendered import RUN_PYTHON, repository, run

OVERRIDES = ["override_model_config=true", "base_num_decoder_layers=2"]
AIM = 1.1
AIM_CACHED_SECONDS = 2.0


def main() -> None:
    """Print both times and peaks, their ratios, and the cached answer's time."""
    folder = repository("preflight")
    shutil.rmtree(folder / "build", ignore_errors=True)
    topology = next(
        line.split("=")[1] for line in (folder / "run.env").read_text().splitlines() if line.startswith("COMPILE_TOP")
    )
    flags = [line for line in (folder / "config/libtpu.flags").read_text().splitlines() if line.startswith("--")]
    # What a person sets by hand to compile on a machine without a TPU.
    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "LIBTPU_INIT_ARGS": " ".join(flags)}
    bare, bare_memory = peak_of(
        [
            RUN_PYTHON,
            "-m",
            "maxtext.trainers.pre_train.train_compile",
            folder / "config/train.yml",
            *OVERRIDES,
            f"compile_topology={topology}",
            "compile_topology_num_slices=1",
            "jax_cache_dir=",
        ],
        folder,
    )
    cold, memory = peak_of([RUN_PYTHON, "-m", "ops.preflight", *OVERRIDES], folder)
    started = time.perf_counter()
    run(folder, "-m", "ops.preflight", *OVERRIDES)
    cached = time.perf_counter() - started
    print(f"{'':<10}{'preflight':>11}{'bare':>10}{'ratio':>8}{'aim':>6}")
    print(f"{'seconds':<10}{cold:>11.1f}{bare:>10.1f}{cold / bare:>8.2f}{AIM:>6}")
    print(f"{'memory, GB':<10}{memory:>11.2f}{bare_memory:>10.2f}{memory / bare_memory:>8.2f}{AIM:>6}")
    print(f"from the cache: {cached:.2f} s (aim: under {AIM_CACHED_SECONDS:g} s)")


if __name__ == "__main__":
    main()
