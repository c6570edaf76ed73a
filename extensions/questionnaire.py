"""The Jinja extension of this template, named in copier.yml's _jinja_extensions."""

import difflib
import re
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copier.errors import UserMessageError
from copier_template_extensions import ContextHook
from jinja2 import Environment, Undefined, pass_context
from jinja2.runtime import Context

__all__ = ["Questionnaire", "facts", "rules"]


def _beside(name: str) -> Any:
    """Load a module of this folder by its path.

    `import` would keep the first version in sys.modules, and `copier update`, which loads
    the old and the new template in one process, would render from the old tables.
    """
    path = Path(__file__).with_name(f"{name}.py")
    spec = spec_from_file_location(f"_copier_maxtext_ray_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from . import facts, rules
else:
    facts = _beside("facts")
    rules = _beside("rules")
    rules.facts = facts


class _Known(Mapping[str, Any]):
    """The answers in a Jinja context; one that is missing or undefined raises KeyError."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self._context = context

    def __getitem__(self, name: str) -> Any:
        value = self._context[name]
        if isinstance(value, Undefined):
            raise KeyError(name)
        return value

    def __iter__(self) -> Any:
        return iter(self._context)

    def __len__(self) -> int:
        return len(self._context)


@pass_context
def problem(context: Context, name: str) -> str:
    """What is wrong with the answer to one question, "" if nothing is: its validator."""
    known = _Known({**context.get_all()})
    return rules.RULES[name](known[name], known)


@pass_context
def required(context: Context, name: str, why: str) -> str:
    """Stop a copy that asks nothing when a question has no default; "" otherwise.

    Raises:
        UserMessageError: with --defaults, since Copier would end in a traceback.
    """
    if context["_copier_conf"]["defaults"]:
        raise UserMessageError(f"{name} is needed: {why}. Add --data {name}=...")
    return ""


def topology_choices(generation: str) -> list[list[str]]:
    """[label, value] of each topology of a generation."""
    choices = []
    for name in facts.topologies(generation):
        shape = facts.slice_of(generation, name)
        chips = "chip" if shape.chips == 1 else "chips"
        hosts = "host" if shape.hosts == 1 else "hosts"
        choices.append(
            [
                f"{name:<9} {shape.chips:>5} {chips} on {shape.hosts} {hosts}",
                name,
            ]
        )
    return choices


def model_choices(generation: str, topology: str) -> list[list[str]]:
    """[label, value] of each model that fits on a slice, with what its plan gives."""
    kinds = {"dense": "dense", "moe": "mixture of experts", "mla": "MLA with experts"}
    limit = facts.GENERATIONS[generation]["hbm_gib_per_device"]
    choices = []
    for name, record in facts.MODELS.items():
        if not facts.can_fit(name, generation, topology):
            continue
        plan = facts.plan_for(name, generation, topology, 1)
        told = f"{plan.hbm_gib:.1f} of {limit:g} GiB a device"
        told += f", {plan.tokens_per_second} tokens/s by the compiler" if plan.compiled else ", estimated"
        choices.append([f"{name:<17} {record['parameters_b']:>6.1f} B  {kinds[record['kind']]:<18}  {told}", name])
    return choices


def default_model(generation: str, topology: str) -> str:
    """The tutorial's model where it fits, else the largest that does."""
    fits = [name for name in facts.MODELS if facts.can_fit(name, generation, topology)]
    if "llama3-8b" in fits:
        return "llama3-8b"
    return max(fits, key=lambda name: float(facts.MODELS[name]["parameters_b"]))


@pass_context
def derive(context: Context, what: str) -> Any:
    """A value that follows from the answers: see the end of copier.yml."""
    answers = _Known({**context.get_all()})
    if what == "slice":
        shape = facts.slice_of(answers["generation"], answers["topology"])
        return shape._asdict()
    if what == "plan":
        plan = facts.run_plan(
            answers["model"],
            answers["generation"],
            answers["topology"],
            answers["num_slices"],
            str(answers["sequence_length"]),
            str(answers["per_device_batch_size"]),
            answers["ici_parallelism"],
        )
        return plan._asdict()
    if what == "maxtext":
        return _maxtext(answers)
    raise KeyError(what)


def _maxtext(answers: _Known) -> dict[str, Any]:
    """MaxText keys for data, tokenizer and mesh, as config/train.yml holds them."""
    chosen = answers["tokenizer"]
    if chosen == "auto":
        chosen = facts.tokenizer_of(answers["model"], answers["dataset_type"])
    mesh = {}
    for network in ("ici", "dcn"):
        sizes = facts.mesh(answers[f"{network}_parallelism"])
        # MaxText leaves one axis of each network open by default; a mesh that does not
        # name that axis has to close it.
        default = {"ici": "fsdp", "dcn": "data"}[network]
        for axis, size in {default: 1, **sizes}.items():
            mesh[f"{network}_{axis}_parallelism"] = size
    return {
        "mesh": mesh,
        "dataset": facts.dataset_settings(answers["dataset_type"], answers["dataset_path"], answers["dataset_format"]),
        "tokenizer": {
            "tokenizer_path": chosen,
            "tokenizer_type": facts.tokenizer_type(chosen),
        },
        "model": facts.MODELS[answers["model"]].get("settings", {}),
    }


def unanswered(project_id: str, bucket: str) -> str:
    """Answers that are still the placeholder, as a comma list."""
    given = {"project_id": project_id, "bucket": bucket}
    return ",".join(n for n, v in given.items() if v == rules.PLACEHOLDERS[n])


def without_credentials(address: str) -> str:
    """A template's address as it may be recorded: user and token of an http address are left out, since the answers
    are committed. Whoever updates needs access of their own (git's credential helper, or ssh).
    """
    return re.sub(r"^(https?://)[^/@]*@", r"\1", address)


def is_local(address: str) -> bool:
    """True for a template in a folder of this machine, which nobody else can update from."""
    return address.startswith("file:") or Path(address).expanduser().is_dir()


class Questionnaire(ContextHook):
    """Gives copier.yml its tables, rules and derived values."""

    def __init__(self, environment: Environment) -> None:
        """Register the globals that copier.yml and the templates use."""
        super().__init__(environment)
        environment.globals.update(
            capacities=facts.capacities,
            default_model=default_model,
            default_topology=lambda generation: facts.GENERATIONS[generation]["default_topology"],
            derive=derive,
            generations=lambda: list(facts.GENERATIONS),
            is_local=is_local,
            model_choices=model_choices,
            placeholder=rules.PLACEHOLDERS.__getitem__,
            price_of=facts.price,
            quotas_of=facts.quotas,
            problem=problem,
            region_of=facts.region_of,
            required=required,
            topology_choices=topology_choices,
            unanswered_of=unanswered,
            without_credentials=without_credentials,
            zones=lambda generation: facts.GENERATIONS[generation]["zones"],
        )

    def hook(self, context: dict[str, Any]) -> None:
        """Refuse wrong answers of --data and --data-file in one clear sentence.

        Copier validates them too, but ends in a Python traceback, ignores names that it
        does not know, and takes a value for a derived answer. This runs with every string
        that Copier renders while it goes through the questions, so each given answer is
        checked as soon as the answers that its rule depends on are known.

        Raises:
            UserMessageError: which Copier prints alone, with exit code 1.
        """
        if context.get("_copier_phase") != "prompt":
            return
        given = context["_copier_conf"]["data"]
        if not given:
            return
        # An update replays all answers at once, also those of questions that this version
        # no longer has; a person who types a few has misspelt.
        if not rules.RULES.keys() <= given.keys():
            for name in given:
                if name not in rules.RULES and not name.startswith("_"):
                    raise UserMessageError(_unknown(name))
        # Not the context itself: while Copier validates one answer, that answer is in it, and
        # what is raised there comes out as a traceback about the wrong question.
        known = _Known(context["_copier_answers"])
        for name, rule in rules.RULES.items():
            if name in given:
                try:
                    refusal = rule(given[name], known)
                except KeyError:
                    continue  # depends on an answer that is still to come
                if refusal:
                    raise UserMessageError(refusal)


def _unknown(name: str) -> str:
    if name in rules.DERIVED:
        return f"{name} is not to be set: it follows from {rules.DERIVED[name]}"
    near = difflib.get_close_matches(name, rules.RULES, n=1)
    if near:
        return f"There is no question {name!r}. Did you mean: {near[0]}"
    return f"There is no question {name!r}. Questions: {', '.join(rules.RULES)}"
