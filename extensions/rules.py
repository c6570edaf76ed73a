"""The rule of every question: what a given answer must be, and what would work instead.

`RULES` has one function a question, in the order of copier.yml. Each takes the raw
answer and the answers before it, and returns "" or one sentence that names the value,
the rule and a value that would work. A function may only look at answers of earlier
questions; an answer that is not known yet raises KeyError.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import facts
else:
    facts = None  # set by questionnaire.py, which loads both files by path

Answers = Mapping[str, Any]

PLACEHOLDERS = {
    "project_id": "your-project-id",
    "bucket": "your-bucket-name",
}

# Values that copier.yml derives, and the answers that they follow from.
DERIVED = {
    "slice": "generation and topology",
    "plan": "model, slice, sequence_length, per_device_batch_size and ici_parallelism",
    "maxtext": "model, mesh, dataset and tokenizer",
    "region": "zone",
    "zone_known": "zone and generation",
    "cluster_location": "cluster_mode and zone",
    "image_repository": "zone, project_id, registry and project_name",
    "unanswered": "project_id and bucket",
    "ownership": "the template",
}

# Mesh axes that a pre-training run may use (mesh_axes in MaxText's base.yml). Left out:
# stage (pipelines need further settings), the inference axes, diloco, and sequence,
# which MaxText 0.2.5 still parses but no longer puts in the mesh.
AXES = [
    "data",
    "fsdp",
    "fsdp_transpose",
    "context",
    "tensor",
    "tensor_sequence",
    "expert",
]
# Axes over which the batch is split (activation_batch in MaxText's logical_axis_rules).
BATCH_AXES = ["data", "fsdp", "fsdp_transpose", "expert"]

_YAML_WORDS = {
    "y",
    "n",
    "yes",
    "no",
    "on",
    "off",
    "true",
    "false",
    "null",
    "none",
    "nan",
    "inf",
}
_YAML_NUMBER = re.compile(
    r"[0-9][0-9_]*(\.[0-9_]*)?(e[-+]?[0-9]+)?|0x[0-9a-f_]+|0o[0-7_]+|0b[01_]+"
    r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}"
)


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _not_text(name: str, value: Any) -> str:
    """An answers file may hold `bucket: 123` or `project_name: yes`, which YAML has
    already turned into something else before Copier sees it.
    """
    if isinstance(value, str):
        return ""
    return (
        f"{name}: YAML reads this answer as {type(value).__name__} {value!r}, not as "
        f'text. Put it in quotes: {name}: "..."'
    )


def _yaml_hostile(name: str, value: str) -> str:
    if value.lower() in _YAML_WORDS or _YAML_NUMBER.fullmatch(value):
        return (
            f"{name}: {_shown(value)} is a word or number of its own in YAML and would not "
            f"be read back as a name. Add to it: {name}=my-{value.lower().strip('.')}"
        )
    return ""


def _dns_label(name: str, value: Any, limit: int, why: str, example: str) -> str:
    if problem := _not_text(name, value):
        return problem
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", value):
        return (
            f"{name}: {_shown(value)} must be lower-case letters, digits and dashes, start "
            f"with a letter and end with a letter or digit. For example: {example}"
        )
    if len(value) > limit:
        return (
            f"{name}: {_shown(value)} has {len(value)} characters; at most {limit} fit, {why}. "
            f"For example: {value[:limit].rstrip('-')}"
        )
    return _yaml_hostile(name, value)


def _whole(value: Any) -> int | None:
    """The integer in an answer, or None. Python's int() would also take 1_000, " 7 " and
    digits of other scripts, none of which is read back as typed.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9][0-9]{0,11})", value):
        return int(value)
    return None


def _number(name: str, value: Any, low: int, high: int, unit: str) -> str:
    number = _whole(value)
    if number is None or not low <= number <= high:
        return f"{name}: {_shown(value)} must be a whole number of {unit} from {low} to {high}."
    return ""


def _choice(name: str, value: Any, options: list[str], of: str = "") -> str:
    if isinstance(value, str) and value in options:
        return ""
    return f"{name}: {_shown(value)} is not offered{of}. Choose one of: {', '.join(options)}"


def _count(answers: Answers, name: str) -> int:
    number = _whole(answers[name])
    if number is None:
        raise KeyError(name)
    return number


# --- the seven that are asked ---------------------------------------------------------


def project_name(value: Any, answers: Answers) -> str:
    """DNS-1035, at most 35: it names the RayJob and RayCluster. KubeRay appends 6
    characters to a RayJob's cluster, and beyond 41 it cuts the head service's name, which
    breaks the addresses that the TPU webhook injects (ai-on-gke issues 963, 1003).
    """
    return _dns_label(
        "project_name",
        value,
        35,
        "because KubeRay and GKE's TPU webhook derive host names from it",
        "my-tpu-run",
    )


def project_id(value: Any, answers: Answers) -> str:
    """6 to 30 characters; projects of an old domain are domain:project (Resource Manager)."""
    if problem := _not_text("project_id", value):
        return problem
    domain, colon, project = value.rpartition(":")
    if not re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", project) or (
        colon and not re.fullmatch(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}", domain)
    ):
        return (
            f"project_id: {_shown(value)} is not the id of a Google Cloud project: 6 to 30 "
            "lower-case letters, digits and dashes, starting with a letter, not ending with "
            "a dash (not the project's name or number). For example: my-project-123, or "
            "example.com:my-project. See: gcloud projects list"
        )
    return _yaml_hostile("project_id", value)


def generation(value: Any, answers: Answers) -> str:
    """A generation that GKE, Ray and MaxText all know."""
    return _choice("generation", value, list(facts.GENERATIONS))


def topology(value: Any, answers: Answers) -> str:
    """A shape of the chosen generation; each has its own."""
    of = answers["generation"]
    if of not in facts.GENERATIONS:
        raise KeyError("generation")
    return _choice("topology", value, facts.topologies(of), f" for {of}")


def zone(value: Any, answers: Answers) -> str:
    """The form of a zone. Lists of zones age, so an unknown one passes with a warning."""
    if problem := _not_text("zone", value):
        return problem
    known = facts.GENERATIONS.get(answers["generation"], {}).get("zones", [])
    if re.fullmatch(r"[a-z]+-[a-z]+[0-9]+", value):
        of_region = [z for z in known if facts.region_of(z) == value]
        return (
            f"zone: {_shown(value)} is a region; a zone of it is needed, for example: "
            f"{(of_region or [value + '-a'])[0]}"
        )
    if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]", value) or len(value) > 40:
        return f"zone: {_shown(value)} is not a zone. Zones of {answers['generation']}: {', '.join(known)}"
    return ""


def model(value: Any, answers: Answers) -> str:
    """A MaxText model whose pre-training makes sense, and whose training fits into the slice's HBM."""
    why = facts.MODELS_LEFT_OUT.get(value, "") if isinstance(value, str) else ""
    if problem := _choice("model", value, list(facts.MODELS), f" ({why})" if why else ""):
        return problem
    generation, topology = answers["generation"], answers["topology"]
    if generation not in facts.GENERATIONS or topology not in facts.topologies(generation):
        raise KeyError("topology")
    if facts.can_fit(value, generation, topology):
        return ""
    needs = facts.estimated_gib(value, generation, topology, 1)
    smallest = {name: facts.smallest_topology(value, name) for name in facts.GENERATIONS}
    works = ", ".join(f"{name} {size}" for name, size in smallest.items() if size)
    return (
        f"model: {value} does not fit on one {generation} {topology} slice: it takes about {needs:.0f} GiB a device "
        f"and there are {facts.GENERATIONS[generation]['hbm_gib_per_device']:g}. "
        f"Smallest that fits: {smallest[generation] or f'none of {generation}'} (over all generations: {works})"
    )


def bucket(value: Any, answers: Answers) -> str:
    """Cloud Storage's naming rules (cloud.google.com/storage/docs/buckets#naming)."""
    if problem := _not_text("bucket", value):
        return problem
    if value.startswith("gs:"):
        return (
            f"bucket: {_shown(value)} is an address; give the bucket's name alone, without "
            f"gs:// and without a folder. For example: {value[3:].strip('/').split('/')[0] or 'my-bucket'}"
        )
    parts = value.split(".")
    if (
        not re.fullmatch(r"[a-z0-9][a-z0-9._-]*[a-z0-9]", value)
        or not 3 <= len(value) <= (222 if len(parts) > 1 else 63)
        or any(not re.fullmatch(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?", p) for p in parts)
    ):
        return (
            f"bucket: {_shown(value)} is not a bucket name: 3 to 63 lower-case letters, "
            "digits, dashes, underscores and dots, starting and ending with a letter or "
            "digit, no dot beside another dot or dash. For example: my-project-maxtext"
        )
    if re.fullmatch(r"[0-9]+(\.[0-9]+){3}", value):
        return f"bucket: {_shown(value)} looks like an IP address. For example: my-project-maxtext"
    if value.startswith("goog") or re.search(r"g[o0][o0]g[l1]e", value):
        return (
            f"bucket: {_shown(value)}: Cloud Storage refuses names that start with goog or "
            "contain google. For example: my-project-maxtext"
        )
    return _yaml_hostile("bucket", value)


# --- not asked, set with --data -------------------------------------------------------


def num_slices(value: Any, answers: Answers) -> str:
    """GKE joins only multi-host slices into a multi-slice job."""
    if problem := _number("num_slices", value, 1, 256, "slices"):
        return problem
    shape = facts.slice_of(answers["generation"], answers["topology"])
    if _whole(value) != 1 and not shape.multi_host:
        larger = [t for t in facts.topologies(shape.generation) if facts.slice_of(shape.generation, t).multi_host]
        return (
            f"num_slices: {_shown(value)} slices need a multi-host topology, and "
            f"{shape.generation} {shape.topology} is one host. Use num_slices=1, or a "
            f"topology such as {', '.join(larger[:3])}"
        )
    return ""


def capacity(value: Any, answers: Answers) -> str:
    """How the slice is obtained; flex-start does not exist for every generation."""
    of = answers["generation"]
    if of not in facts.GENERATIONS:
        raise KeyError("generation")
    return _choice("capacity", value, facts.capacities(of), f" for {of}")


def reservation(value: Any, answers: Answers) -> str:
    """A Compute Engine reservation, by name or by path, when and only when it is used."""
    if problem := _not_text("reservation", value):
        return problem
    if answers["capacity"] != "reservation":
        if value:
            return (
                f"reservation: {_shown(value)} is given but capacity is {answers['capacity']}. "
                'Set capacity=reservation to use it, or reservation="" to leave it out.'
            )
        return ""
    name = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
    path = re.fullmatch(
        rf"(projects/(?P<owner>[a-z0-9.:-]+)/reservations/)?(?P<name>{name})"
        rf"(/reservationBlocks/{name}(/reservationSubBlocks/{name})?)?",
        value,
    )
    if (
        not path
        or (path["owner"] is None and "/" in value)
        or (path["owner"] is not None and project_id(path["owner"], answers))
    ):
        return (
            f"reservation: {_shown(value)} must name the reservation that capacity=reservation "
            "uses: its name, or projects/OWNER/reservations/NAME, also with "
            "/reservationBlocks/BLOCK and /reservationSubBlocks/SUB. For example: "
            "reservation=my-reservation. See: gcloud compute reservations list"
        )
    hostile = (_yaml_hostile("reservation", part) for part in value.split("/"))
    return next(filter(None, hostile), "")


def cluster_mode(value: Any, answers: Answers) -> str:
    """GKE Standard or Autopilot."""
    return _choice("cluster_mode", value, ["standard", "autopilot"])


def cluster_name(value: Any, answers: Answers) -> str:
    """GKE cluster names have at most 40 characters."""
    return _dns_label("cluster_name", value, 40, "which is GKE's limit", "my-cluster")


def namespace(value: Any, answers: Answers) -> str:
    """A Kubernetes namespace that is not the system's own."""
    if problem := _dns_label("namespace", value, 63, "which is Kubernetes' limit", "ray"):
        return problem
    if value.startswith(("kube-", "gke-", "gmp-")):
        return f"namespace: {_shown(value)} belongs to the system. For example: ray"
    return ""


def service_account(value: Any, answers: Answers) -> str:
    """The Kubernetes service account of the pods."""
    return _dns_label("service_account", value, 63, "which is Kubernetes' limit", "ray-train")


def registry(value: Any, answers: Answers) -> str:
    """An Artifact Registry repository id, not an address."""
    if isinstance(value, str) and ("/" in value or ".pkg.dev" in value):
        return (
            f"registry: {_shown(value)} is an address; give the Artifact Registry "
            "repository's name alone. For example: my-images"
        )
    return _dns_label("registry", value, 63, "which is Artifact Registry's limit", "my-images")


def run_name(value: Any, answers: Answers) -> str:
    """The folder of the checkpoints, also the name of the run in Ray: a fixed run name is
    what makes every retry a resume. A RayJob may carry it, hence 35 (see project_name).
    """
    return _dns_label("run_name", value, 35, "because a RayJob may carry it", "run-2")


def sequence_length(value: Any, answers: Answers) -> str:
    """Tokens. The flash attention kernel works in blocks of 128, MaxText's default
    configuration in blocks of 512.
    """
    if value == "auto":
        return ""
    number = _whole(value)
    if number is None or not 128 <= number <= 1048576 or number % (512 if number > 512 else 128):
        return (
            f"sequence_length: {_shown(value)} must be auto, or tokens from 128 to 1048576 "
            "in multiples of 512 (of 128 up to 512), the blocks of TPU flash attention. "
            "For example: 4096"
        )
    return ""


def _parallelism(name: str, value: Any, answers: Answers, total: int, what: str, works: str) -> str:
    if problem := _not_text(name, value):
        return problem
    try:
        sizes = facts.mesh(value)
        shaped = re.fullmatch(r"[a-z_]+=(-1|[1-9][0-9]{0,5})(,[a-z_]+=(-1|[1-9][0-9]{0,5}))*", value)
    except ValueError:
        shaped = None
    if not shaped:
        return f"{name}: {_shown(value)} must be a comma list of axis=size, each axis once. For example: {works}"
    if unknown := [axis for axis in sizes if axis not in AXES]:
        return (
            f"{name}: {_shown(value)} has {unknown[0]}, not a mesh axis for pre-training. Axes: "
            f"{', '.join(AXES)}. For example: {works}"
        )
    if list(sizes.values()).count(-1) > 1:
        return f"{name}: {_shown(value)} leaves more than one axis open with -1. For example: {works}"
    full = facts.filled(sizes, total)
    if full is None:
        return f"{name}: {_shown(value)} does not multiply to the {total} {what}. For example: {works}"
    experts = facts.MODELS[answers["model"]].get("experts", 1)
    if full.get("expert", 1) > 1 and experts % full["expert"]:
        return (
            f"{name}: {_shown(value)} splits experts {full['expert']} ways, and "
            f"{answers['model']} has {experts if experts > 1 else 'none'}. For example: {works}"
        )
    return ""


def ici_parallelism(value: Any, answers: Answers) -> str:
    """Mesh inside a slice: the sizes multiply to its JAX devices (MaxText max_utils)."""
    shape = facts.slice_of(answers["generation"], answers["topology"])
    return _parallelism(
        "ici_parallelism",
        value,
        answers,
        shape.devices,
        f"devices of a {shape.generation} {shape.topology} slice",
        "fsdp=-1",
    )


def dcn_parallelism(value: Any, answers: Answers) -> str:
    """Mesh across slices: the sizes multiply to num_slices (MaxText max_utils)."""
    slices = _count(answers, "num_slices")
    if isinstance(value, str) and re.search(r"\b(tensor|tensor_sequence)=(?!1\b)", value):
        return (
            f"dcn_parallelism: {_shown(value)} splits tensors across slices, over a network "
            "far slower than ICI. For example: data=-1"
        )
    return _parallelism("dcn_parallelism", value, answers, slices, "slice(s)", "data=-1")


def per_device_batch_size(value: Any, answers: Answers) -> str:
    """Sequences a device and step. Fractions are allowed as far as the batch axes of the
    mesh still get whole sequences.
    """
    if value == "auto":
        return ""
    if (
        isinstance(value, bool)
        or not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", str(value))
        or not 0 < float(value) <= 1024
    ):
        return (
            f"per_device_batch_size: {_shown(value)} must be auto, or a number above 0 and up to 1024. For example: 1"
        )
    shape = facts.slice_of(answers["generation"], answers["topology"])
    slices = _count(answers, "num_slices")
    try:
        inside = facts.filled(facts.mesh(answers["ici_parallelism"]), shape.devices)
        across = facts.filled(facts.mesh(answers["dcn_parallelism"]), slices)
    except (ValueError, AttributeError) as error:
        raise KeyError("ici_parallelism") from error
    if inside is None or across is None:
        raise KeyError("ici_parallelism")
    ways = 1
    for axis in BATCH_AXES:
        ways *= inside.get(axis, 1) * across.get(axis, 1)
    devices = shape.devices * slices
    total = float(value) * devices
    if abs(total - round(total)) > 1e-6 or round(total) % ways:
        return (
            f"per_device_batch_size: {_shown(value)} on {devices} devices is {total:g} sequences "
            f"a step, which the mesh splits {ways} ways. Use a multiple of {ways / devices:g}"
        )
    return ""


def steps(value: Any, answers: Answers) -> str:
    """Optimizer steps."""
    return _number("steps", value, 1, 100_000_000, "steps")


def checkpoint_period(value: Any, answers: Answers) -> str:
    """A period beyond the last step would save nothing to resume from."""
    last = _count(answers, "steps")
    if problem := _number("checkpoint_period", value, 1, 100_000_000, "steps"):
        return problem
    if (_whole(value) or 0) > last:
        return (
            f"checkpoint_period: {_shown(value)} is beyond the last of {last} steps, so a "
            f"restart would begin again. Use at most {last}"
        )
    return ""


def checkpoints_kept(value: Any, answers: Answers) -> str:
    """At least two, so that a broken newest checkpoint leaves one to go back to."""
    return _number("checkpoints_kept", value, 2, 10000, "checkpoints")


def max_failures(value: Any, answers: Answers) -> str:
    """Bounded: Ray's -1 would retry, and bill, for ever."""
    return _number("max_failures", value, 0, 1000, "restarts")


def dataset_type(value: Any, answers: Answers) -> str:
    """The input pipelines of MaxText that are supported here."""
    return _choice("dataset_type", value, ["synthetic", "hf", "grain"])


def dataset_path(value: Any, answers: Answers) -> str:
    """Where real data lies; gs://bucket/... is read directly, /data/... is the bucket as
    the pods mount it.
    """
    if problem := _not_text("dataset_path", value):
        return problem
    kind = answers["dataset_type"]
    if kind == "synthetic":
        if value:
            return (
                f"dataset_path: {_shown(value)} is given but dataset_type is synthetic. Set "
                'dataset_type=hf or grain to use it, or dataset_path="" to leave it out.'
            )
        return ""
    files = r"(gs://[a-z0-9][a-z0-9._-]+|/data)(/[A-Za-z0-9*?][A-Za-z0-9._=*?-]*)+"
    if re.fullmatch(files, value):
        return ""
    if kind == "hf":
        part = r"[A-Za-z0-9][A-Za-z0-9._-]*"
        if re.fullmatch(rf"{part}(/{part})+", value):
            return ""
        return (
            f"dataset_path: {_shown(value)} must be a Hugging Face dataset with an optional "
            "folder, or Parquet files. For example: allenai/c4/en, "
            "gs://my-bucket/c4/*.parquet or /data/c4/*.parquet"
        )
    return (
        f"dataset_path: {_shown(value)} must be files for Grain. For example: "
        "gs://my-bucket/c4/*.parquet, or /data/c4/*.array_record on the mounted bucket"
    )


def dataset_format(value: Any, answers: Answers) -> str:
    """File formats that MaxText's grain pipeline reads and shuffles."""
    return _choice("dataset_format", value, ["parquet", "arrayrecord"])


def tokenizer(value: Any, answers: Answers) -> str:
    """A tokenizer whose vocabulary is the model's."""
    if problem := _not_text("tokenizer", value):
        return problem
    if value == "auto":
        return ""
    name = answers["model"]
    own = facts.tokenizer_of(name, answers["dataset_type"])
    known = [record for record in facts.MODELS.values() if value in (record["tokenizer"], record.get("asset"))]
    hugging_face = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", value)
    mounted = re.fullmatch(r"/data(/[A-Za-z0-9][A-Za-z0-9._-]*)+", value)
    if not known and not hugging_face and not mounted:
        return (
            f"tokenizer: {_shown(value)} must be auto, a Hugging Face id, a file below /data on "
            f"the mounted bucket, or the name of MaxText's own copy. For example: {own}"
        )
    vocabulary = facts.MODELS[name]["vocab_size"]
    if known and all(record["vocab_size"] != vocabulary for record in known):
        return (
            f"tokenizer: {_shown(value)} has a vocabulary of {known[0]['vocab_size']}, that of "
            f"{name} is {vocabulary}. Use auto, which is {own}"
        )
    if answers["dataset_type"] == "hf" and facts.tokenizer_type(value) != "huggingface":
        return (
            f"tokenizer: {_shown(value)} is a {facts.tokenizer_type(value)} file, and MaxText's "
            f"hf pipeline reads Hugging Face tokenizers only. For example: {own}"
        )
    return ""


def min_slices(value: Any, answers: Answers) -> str:
    """Ray Train restarts the job on the slices that are left, from the newest checkpoint. So the slices must hold a
    copy of the weights each (data=-1 between them): on fewer slices a device then has as much to hold as before. And
    the data must be found on fewer hosts: MaxText 0.2.5 has an elastic iterator for grain, but looks for it by a class
    (common/grain_utility.py) that iter() of grain 0.2.18 no longer gives, so a rehearsal with it ended at "4 processes
    found in Grain checkpoint directory, but only 2 jax processes".
    """
    slices = _count(answers, "num_slices")
    if problem := _number("min_slices", value, 0, slices, "slices"):
        return f"{problem} Use 0 to need all {slices}."
    fewest = _whole(value)
    if not fewest or fewest == slices:
        return ""
    if answers["dataset_type"] == "grain":
        return (
            f"min_slices: {_shown(value)} changes the number of hosts during the run, and MaxText resumes grain's data "
            "only on the same number. Use min_slices=0, or another dataset_type, e.g. hf"
        )
    if dcn_parallelism(answers["dcn_parallelism"], answers):
        raise KeyError("dcn_parallelism")
    across = facts.mesh(answers["dcn_parallelism"])
    if {axis: size for axis, size in across.items() if size != 1} != {"data": -1}:
        return (
            f"min_slices: {_shown(value)} needs dcn_parallelism=data=-1, and it is {answers['dcn_parallelism']}: any "
            "other mesh between slices does not fit fewer of them, or gives a device more to hold"
        )
    return ""


RULES: dict[str, Callable[[Any, Answers], str]] = {
    rule.__name__: rule
    for rule in (
        project_name,
        project_id,
        generation,
        topology,
        zone,
        model,
        bucket,
        num_slices,
        capacity,
        reservation,
        cluster_mode,
        cluster_name,
        namespace,
        service_account,
        registry,
        run_name,
        sequence_length,
        ici_parallelism,
        dcn_parallelism,
        per_device_batch_size,
        steps,
        checkpoint_period,
        checkpoints_kept,
        max_failures,
        dataset_type,
        dataset_path,
        dataset_format,
        tokenizer,
        min_slices,
    )
}
