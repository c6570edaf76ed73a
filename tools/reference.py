"""Write what the documentation derives: the tables under docs/reference/, and the README's transcript of a rehearsal.

The tables come from copier.yml, the extension's data and the Makefiles. `--check` writes nothing and fails when a page
is not what its source says now.
"""

import argparse
import importlib
import inspect
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import yaml
from copier import run_copy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# The extension loads its tables by path, as Copier has it do; so they come from there.
QUESTIONNAIRE: Any = importlib.import_module("extensions.questionnaire")
FACTS = QUESTIONNAIRE.facts
RULES = QUESTIONNAIRE.rules.RULES
TARGET = re.compile(r"^([a-z][a-z-]*):.*?## (.*)$", re.MULTILINE)


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines) + "\n"


def code(value: object) -> str:
    """A value as inline code, or nothing for an empty one."""
    return f"`{value}`" if value not in ("", None) else ""


def rule_of(name: str) -> str:
    """What an answer must be: the first paragraph of the docstring of the question's rule."""
    document = inspect.getdoc(RULES[name]) or ""
    return " ".join(document.split("\n\n")[0].split())


def questions() -> str:
    """Every question, with the answer that `copier copy --defaults` gives."""
    listed = {
        name: question
        for name, question in yaml.safe_load((ROOT / "copier.yml").read_text()).items()
        if not name.startswith("_") and question.get("when") is not False
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = run_copy(str(ROOT), folder, vcs_ref="HEAD", defaults=True, unsafe=True, quiet=True)
        answers = dict(worker.answers.combined)

    def rendered(template: object) -> str:
        return worker.jinja_env.from_string(str(template)).render(**answers)

    def row(name: str, question: dict[str, Any]) -> tuple[str, ...]:
        choices = question.get("choices", [])
        if isinstance(choices, str):
            choices = json.loads(rendered(choices))
        values = [choice[1] if isinstance(choice, list) else choice for choice in choices]
        page = {"topology": "[slices](slices.md)", "model": "[models](models.md)"}.get(name)
        allowed = page or ", ".join(code(value) for value in values) or rule_of(name)
        return code(name), rendered(question["help"]), code(answers[name]), allowed

    head = ("Question", "What it is", "Default", "Allowed")
    asked = [row(name, question) for name, question in listed.items() if "ask" not in question]
    unasked = [row(name, question) for name, question in listed.items() if "ask" in question]
    return f"""# Questions

Defaults and choices are shown for the default answers; those that depend on an earlier answer follow it.
An answer that breaks a rule is refused with a sentence that names a value that would work.

## Asked

{table(head, *asked)}
## Not asked

Set with `--data NAME=VALUE` in `copier copy`, or asked for with `--ask NAME`; later with `make reconfigure`.

{table(head, *unasked)}"""


def slices() -> str:
    """Every generation and topology that can be chosen, with what follows from it."""
    parts = [
        "# Slices\n\nTopologies that GKE, Ray and MaxText can use together. Prices are indicative, on demand, "
        "in a US region; look up the current one before you rely on it.\n"
    ]
    for generation, record in FACTS.GENERATIONS.items():
        rows = [FACTS.slice_of(generation, topology) for topology in FACTS.topologies(generation)]
        first = rows[0]
        price = (
            f"{first.price_per_chip_hour} USD a chip and hour ({first.price_date})"
            if first.price_per_chip_hour
            else "no price published"
        )
        parts.append(
            f"## {generation}\n\n"
            f"{first.hbm_gib_per_device:g} GiB of usable HBM and {first.peak_tflops_per_device:g} bf16 TFLOP/s "
            f"a JAX device; {price}.\n"
            f"Zones known: {', '.join(record['zones'])}.\n"
            f"Capacity: {', '.join(FACTS.capacities(generation))}.\n\n"
            + table(
                ("Topology", "Hosts", "Chips", "JAX devices", "Machine type", "Ray", "MaxText's compile_topology"),
                *(
                    (
                        code(s.topology),
                        str(s.hosts),
                        str(s.chips),
                        str(s.devices),
                        code(s.machine_type),
                        f"`{s.ray_accelerator_type}`, `{s.ray_pod_type}`",
                        code(s.compile_topology),
                    )
                    for s in rows
                ),
            )
        )
    return "\n".join(parts)


def models() -> str:
    """Every model that can be chosen, and those of MaxText that cannot, with the reason."""
    kinds = {"dense": "dense", "moe": "mixture of experts", "mla": "latent attention (MLA), mixture of experts"}
    offered = [
        (code(name), record["family"], kinds[record["kind"]], f"{record['parameters_b']:g}", code(record["tokenizer"]))
        for name, record in FACTS.MODELS.items()
    ]
    left_out = [(code(name), reason) for name, reason in FACTS.MODELS_LEFT_OUT.items()]
    return f"""# Models

The models of the pinned MaxText whose pre-training makes sense here, and the tokenizer that each one takes by default.

{table(("Model", "Family", "Kind", "Parameters (1e9)", "Tokenizer (Hugging Face id)"), *offered)}
## Left out

{table(("Model", "Why"), *left_out)}"""


def plans() -> str:
    """The best plan of every job that was compiled, and what did not fit or did not compile."""

    def size(row: dict[str, str]) -> str:
        limit = FACTS.GENERATIONS[row["generation"]]["hbm_gib_per_device"]
        return f"{row['hbm_gib'] or '?'} of {limit:g}"

    def place(row: dict[str, str]) -> str:
        many = "" if row["num_slices"] == "1" else f"{row['num_slices']} x "
        return f"{many}{row['generation']} {row['topology']}"

    best: dict[tuple[str, str], dict[str, str]] = {}
    for row in FACTS.COMPILED:
        key = row["model"], place(row)
        fits = not row["problem"] and float(row["hbm_gib"]) <= FACTS.usable_gib(row["generation"])
        if fits and (key not in best or int(row["tokens_per_second"]) > int(best[key]["tokens_per_second"])):
            best[key] = row
    fitting = [
        (
            code(model),
            slice_name,
            row["recipe"],
            row["per_device_batch_size"],
            size(row),
            row["tokens_per_second"],
            f"{float(row['mfu']):.1%}",
            row["binds"],
            row["libtpu"],
        )
        for (model, slice_name), row in sorted(best.items())
    ]
    failed = [
        (code(row["model"]), place(row), row["recipe"], row["per_device_batch_size"], size(row), row["problem"])
        for row in FACTS.COMPILED
        if row["problem"]
    ]
    return f"""# Plans

What the TPU compiler said, and what follows from its cycles: **estimates, not measurements**. The best plan of each
job that was compiled; a larger slice of the generation takes it over until its own is compiled, and says so. HBM in GiB
a JAX device, speed in tokens a second and device, sequences of {FACTS.PLANS["default"]["sequence_length"]} tokens.
`make plans` in the template's repository renews the table; `make preflight` in a generated one compiles its own job.

{table(("Model", "Slice", "Recipe", "Batch", "HBM", "Tokens/s", "MFU", "Bound by", "libtpu"), *fitting)}
## What does not fit or does not compile

{table(("Model", "Slice", "Recipe", "Batch", "HBM needed", "Why"), *failed)}"""


def targets() -> str:
    """The make targets of a generated repository and of this one."""
    here = TARGET.findall((ROOT / "Makefile").read_text())
    generated = TARGET.findall((ROOT / "template/Makefile").read_text())
    return f"""# Make targets

## In a generated repository

{table(("Target", "What it does"), *((code(name), text) for name, text in generated))}
## In this repository

{table(("Target", "What it does"), *((code(name), text) for name, text in here))}"""


def readme() -> str:
    """README.md with the transcript of docs/rehearsal.txt, as recorded from a real `make demo`, between its marks."""
    text = (ROOT / "README.md").read_text()
    transcript = ROOT / "docs/rehearsal.txt"
    shown = f"\n```\n{transcript.read_text().rstrip()}\n```\n\n" if transcript.exists() else ""
    return re.sub(r"(<!-- rehearsal: .* -->\n).*?(<!-- end -->)", lambda m: m[1] + shown + m[2], text, flags=re.DOTALL)


def main() -> int:
    """Exit status 1 when `--check` finds something stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when something is stale, write nothing")
    check = parser.parse_args().check
    note = "<!-- Written by `make docs`; not to be edited. -->\n"
    pages = {
        f"docs/reference/{page.__name__}.md": note + page() for page in [questions, slices, models, plans, targets]
    }
    stale = []
    for name, text in {**pages, "README.md": readme()}.items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if check and stale:
        print(f"stale: {', '.join(stale)}. Run `make docs` and commit the result.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
