"""Trains every model named on the command line in small, in one process: runs in a generated repository's Python.

Prints one line a model: its name, and `ok` or the error. The data is the first argument, a glob of Parquet files.
"""

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

DEVICES = 8
STEPS = 3
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    "DECOUPLE_GCLOUD": "TRUE",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def main() -> None:
    """Train each model for STEPS steps with the settings that a rehearsal would give it."""
    from absl import logging
    from maxtext.trainers.pre_train import train
    from ops import rehearse, run_env, small_model

    logging.set_verbosity(logging.ERROR)
    run, (data, *names) = run_env.load(), sys.argv[1:]
    tokenizer = small_model.maxtext_folder() / "assets" / "tokenizers" / "tokenizer.llama2"
    for name in names:
        job = dataclasses.replace(run, model=name, devices_per_slice=DEVICES, num_slices=1)
        settings, _ = rehearse.overrides(job, {"ici_fsdp_parallelism": -1})
        metrics = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        try:
            train.main(
                [
                    "train.py",
                    str(small_model.maxtext_folder() / "configs" / "base.yml"),
                    *settings,
                    f"run_name={name}",
                    f"model_name={name}",
                    f"steps={STEPS}",
                    "enable_checkpointing=false",
                    f"grain_train_files={data}",
                    f"tokenizer_path={tokenizer}",
                    f"metrics_file={metrics}",
                ]
            )
            last = json.loads(metrics.read_text().splitlines()[-1])
            print(f"MODEL {name} {'ok' if int(last['step']) == STEPS - 1 else last}", flush=True)
        except Exception:
            print(f"MODEL {name} {traceback.format_exc().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
