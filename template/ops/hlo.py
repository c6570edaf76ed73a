"""What one optimized HLO module of the TPU compiler does in a step: counted from its text, without jax.

XLA's own `cost_analysis()` counts the body of a loop once, so a model of 32 layers in a scan looks like one layer. Here
ENTRY and every loop body are walked with their trip counts, which are found by running the loop's counter.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

_ITEM_BYTES = {"pred": 1.0, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "token": 0.0, "opaque": 0.0, "c128": 16.0}
_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}
# These move nothing: they name, group or split what is there, or wait for what was counted where it started.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "partition-id",
    "replica-id",
    "after-all",
    "add-dependency",
    "opt-barrier",
    "recv",
}
_CALLED_ATTRIBUTE = re.compile(r"(calls|body|condition|to_apply)=%?([\w.\-]+)")
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]\d?\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_HEAD = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_COUNTER_LIMIT = 100_000


@dataclasses.dataclass(frozen=True)
class Array:
    """One array: element type, dimensions, and the memory it lies in (0 HBM, 1 VMEM, 5 host; others are small)."""

    kind: str
    dimensions: tuple[int, ...]
    memory: int

    @functools.cached_property
    def bytes(self) -> float:
        """Bytes of the elements, without padding."""
        width = _ITEM_BYTES.get(self.kind)
        if width is None:
            digits = re.search(r"\d+", self.kind)
            width = int(digits[0]) / 8 if digits else 0.0
        return width * math.prod(self.dimensions)


@functools.lru_cache(maxsize=65536)
def _arrays(text: str) -> tuple[Array, ...]:
    """Return the arrays of an HLO type, a tuple's one after the other."""
    found = []
    for kind, dimensions, layout in _SHAPE.findall(text):
        memory = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size.lstrip("<=")) for size in dimensions.split(",") if size)
        found.append(Array(kind, sizes, int(memory[1]) if memory else 0))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it produces."""
        return _arrays(self.type)

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """Computations that it names: calls, body, condition, to_apply."""
        return dict(_CALLED_ATTRIBUTE.findall(self.attributes))

    @functools.cached_property
    def estimated_cycles(self) -> int:
        """Cycles of the TensorCore that libtpu expects of it; 0 where it says none."""
        found = re.search(r'"estimated_cycles":"?(\d+)', self.attributes)
        return int(found[1]) if found else 0

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the traced program it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions; `thread` is empty for the TensorCore, `sparsecore` for the SparseCores."""

    name: str
    instructions: dict[str, Instruction]
    thread: str

    @functools.cached_property
    def root(self) -> Instruction:
        """What it returns."""
        last = None
        for last in self.instructions.values():
            if last.is_root:
                return last
        assert last is not None, self.name
        return last

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {int(one.operands[0]): one for one in self.instructions.values() if one.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction, as often as it runs in a step."""

    kind: str
    mode: str
    """How it runs: `sync` (the TensorCore waits), `async`, or `sparsecore` (async on the SparseCores)."""
    bytes: float
    """Bytes that one device sends in one run."""
    group: int
    """Devices of a group."""
    count: float
    """Runs in a step."""
    axes: int
    """Physical ICI axes that a group spans, a wrapped one counted twice; 0 where it stays on one chip or the devices
    are not known."""
    dcn: bool
    """Whether it goes to other slices; `group` then counts slices."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One custom call (a Pallas kernel such as flash attention), as often as it runs in a step."""

    name: str
    op_name: str
    """Where in the traced program it comes from."""
    count: float
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    """Element type and dimensions of its array operands, in order."""
    results: tuple[tuple[str, tuple[int, ...]], ...]
    options: dict[str, int]
    """What the kernel says of itself, e.g. block_q; empty where it says nothing."""
    estimated_cycles: int
    """Of one run; 0 where libtpu says none."""


@dataclasses.dataclass
class Totals:
    """What one device does in one step."""

    matmul_flops: float = 0.0
    """Floating-point operations of all matrix multiplications outside of kernels; a multiply-add counts as two."""
    hbm_bytes: float = 0.0
    """Bytes read from and written to HBM by everything outside VMEM; what a kernel reads again is not in it."""
    host_bytes: float = 0.0
    """Bytes moved between HBM and the host's memory."""
    cycles: float = 0.0
    """libtpu's estimated cycles of the TensorCore, kernels left out."""
    best_flops_per_cycle: float = 0.0
    """The most matmul FLOPs per estimated cycle of one instruction: a check of the clock."""
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)
    """Loops whose trip count could not be found; their bodies are counted once."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a device is: its slice, its chip's coordinates in it, and its number on the chip."""

    slice: int
    coordinates: tuple[int, ...]
    core: int


def parse(text: str) -> tuple[dict[str, Computation], str, int]:
    """Return the computations of an HLO module by name, the name of ENTRY, and the number of its devices.

    Raises ValueError when the text has no ENTRY.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    header = text[: text.find("\n")]
    partitions = re.search(r"num_partitions=(\d+)", header)
    lines: dict[str, Instruction] = {}
    name, whole = "", ""
    for raw in text.splitlines():
        if not name:
            if raw.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.\-]+) \(", raw)):
                name, lines, whole = found[2], {}, ""
                if found[1]:
                    entry = name
            continue
        if raw == "}" or raw.startswith("}, execution_thread"):
            marked = re.search(r'execution_thread="(\w+)"', raw)
            thread = marked[1] if marked and marked[1] != "main" else ""  # "main" is the TensorCore's
            computations[name] = Computation(name, lines, thread)
            name = ""
            continue
        # Metadata of kernels is broken over several lines.
        whole = f"{whole} {raw}" if whole and not _HEAD.match(raw) else raw
        if instruction := _instruction(whole.strip()):
            lines[instruction.name] = instruction
    if not entry:
        raise ValueError("this is no HLO module: it has no ENTRY computation")
    return computations, entry, int(partitions[1]) if partitions else 1


def _closing(text: str, start: int) -> int:
    """Return the position of the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "([{":
            depth += 1
        elif text[position] in ")]}":
            depth -= 1
            if depth == 0:
                return position
    raise ValueError(f"unbalanced brackets in HLO: {text[:200]}")


def _instruction(line: str) -> Instruction | None:
    """Return the instruction on this line, None for a line that is none."""
    head = _HEAD.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    kind, rest = line[start:end], line[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    opcode = rest[:opening]
    operands = (inside,) if opcode in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", inside))
    if opcode == "constant":
        operands = (inside[:32],)  # only scalars are ever read
    return Instruction(head[2], kind, opcode, operands, rest[closing + 1 :], bool(head[1]))


def analyze(text: str, places: list[Place] | None = None, wrap: tuple[bool, ...] = ()) -> Totals:
    """Return what one device does in one step of the optimized HLO module `text`.

    `places` are the devices in the order of the module's partitions; `wrap` says which physical axes are rings. Without
    places, collectives carry no axes.
    """
    computations, entry, partitions = parse(text)
    return _Walk(computations, partitions, places, wrap).run(entry)


class _Scope:
    """A computation while it is walked, with what its parameters are: to find the values of scalars."""

    def __init__(self, computation: Computation, parent: "_Scope | None" = None, caller: Instruction | None = None):
        self.computation = computation
        self.parent = parent
        self.caller = caller
        self.counters: dict[int, int] = {}  # elements of a loop's tuple whose value at this moment is known


class _Walk:
    """One walk over a module."""

    def __init__(
        self, computations: dict[str, Computation], partitions: int, places: list[Place] | None, wrap: tuple[bool, ...]
    ) -> None:
        self.computations = computations
        self.partitions = partitions
        self.slices = len({place.slice for place in places or []}) or 1
        # Of several slices, each runs a module of its own, in which only its own devices are partitions.
        own = [place for place in places or [] if place.slice == places[0].slice] if places else []
        self.places = own if len(own) == partitions else None
        self.wrap = wrap
        self.totals = Totals()
        self.mode = "sync"  # how what is walked at this moment runs: see Collective.mode
        self._flops: dict[str, float] = {}
        self._groups: dict[str, list[list[int]]] = {}

    def run(self, entry: str) -> Totals:
        self._computation(_Scope(self.computations[entry]), 1.0)
        return self.totals

    def _computation(self, scope: _Scope, times: float) -> None:
        for one in scope.computation.instructions.values():
            if one.opcode == "while":
                trips = self._trips(scope, one)
                if trips is None:
                    self.totals.unknown_loops.append(one.op_name or one.name)
                    trips = 1
                self._computation(_Scope(self.computations[one.called["body"]], scope, one), times * trips)
            elif one.opcode == "call":
                self._computation(_Scope(self.computations[one.called["to_apply"]], scope, one), times)
            elif one.opcode == "conditional":
                self._conditional(scope, one, times)
            elif one.opcode in ("call-start", "async-start", "fusion-start"):
                self._asynchronous(scope, one, times)
            elif one.opcode not in _FREE and not one.opcode.endswith(("-done", "-update")):
                self._simple(scope.computation, one, times)

    def _conditional(self, scope: _Scope, one: Instruction, times: float) -> None:
        """Count the branch that takes longest."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
        names = (
            re.findall(r"[\w.\-]+", listed[1])
            if listed
            else re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", one.attributes)
        )
        outer, best = self.totals, Totals()
        for name in names:
            self.totals = Totals()
            self._computation(_Scope(self.computations[name], scope, one), times)
            if (self.totals.cycles, self.totals.hbm_bytes) >= (best.cycles, best.hbm_bytes):
                best = self.totals
        for field in dataclasses.fields(Totals):
            before, more = getattr(outer, field.name), getattr(best, field.name)
            setattr(outer, field.name, max(before, more) if field.name.startswith("best") else before + more)
        self.totals = outer

    def _asynchronous(self, scope: _Scope, one: Instruction, times: float) -> None:
        """Count what another thread does beside the TensorCore, as libtpu has the SparseCores do collectives."""
        inner = self.computations[one.called.get("calls") or one.called["to_apply"]]
        before, self.mode = self.mode, inner.thread or "async"
        self._computation(_Scope(inner, scope, one), times)
        self.mode = before

    def _simple(self, computation: Computation, one: Instruction, times: float) -> None:
        totals = self.totals
        kind = one.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            self._collective(computation, one, kind, times, "async" if one.opcode.endswith("-start") else self.mode)
            self._memory(computation, one, times)
            return
        if one.opcode == "send":
            self._send(computation, one, times)
            return
        flops = 0.0
        if one.opcode == "fusion":
            if found := self._collective_inside(one):
                self._collective(*found, times, self.mode)
            flops = self._flops_of(one.called["calls"])
        elif one.opcode in ("convolution", "dot"):
            flops = _matmul_flops(computation, one)
        elif one.opcode == "custom-call":
            self._kernel(computation, one, times)
        totals.matmul_flops += times * flops
        if one.opcode != "custom-call" and self.mode == "sync":
            totals.cycles += times * one.estimated_cycles
        if one.estimated_cycles and flops:
            totals.best_flops_per_cycle = max(totals.best_flops_per_cycle, flops / one.estimated_cycles)
        self._memory(computation, one, times)

    def _kernel(self, computation: Computation, one: Instruction, times: float) -> None:
        target = re.search(r'custom_call_target="([^"]*)"', one.attributes)
        name = target[1] if target else ""
        if name != "tpu_custom_call":  # the others are the compiler's own bookkeeping
            self.totals.cycles += times * one.estimated_cycles
            return
        options = {
            key: int(value) if value.isdigit() else int(value == "true")
            for key, value in re.findall(r'\\"(\w+)\\": (\d+|true|false)', one.attributes)
        }
        self.totals.kernels.append(
            Kernel(
                one.name.split(".")[0],
                one.op_name,
                times,
                tuple((array.kind, array.dimensions) for array in _operand_arrays(computation, one)),
                tuple((array.kind, array.dimensions) for array in one.arrays),
                options,
                one.estimated_cycles,
            )
        )

    # --- Matrix multiplications ---

    def _flops_of(self, name: str) -> float:
        """Return the matmul FLOPs of a fused computation and of those that it calls."""
        if name not in self._flops:
            computation = self.computations[name]
            total = 0.0
            for one in computation.instructions.values():
                if one.opcode in ("convolution", "dot"):
                    total += _matmul_flops(computation, one)
                elif one.opcode == "fusion":
                    total += self._flops_of(one.called["calls"])
            self._flops[name] = total
        return self._flops[name]

    # --- Memory ---

    def _memory(self, computation: Computation, one: Instruction, times: float) -> None:
        """Add the bytes that `one` reads from and writes to HBM and the host's memory."""
        if one.opcode in ("copy-start", "slice-start"):
            # (destination, source, context): as much is moved as the destination holds.
            target, source = one.arrays[:2]
            if one.opcode == "slice-start":
                source, target = target, source
            ends = (target.memory, computation.instructions[one.operands[0]].arrays[0].memory)
            size = min(target.bytes, source.bytes)
            self.totals.hbm_bytes += times * size * ends.count(0)
            self.totals.host_bytes += times * size * (5 in ends)
            return
        reads: dict[int, float] = {}
        writes: float | None = None
        if one.opcode == "fusion" and "calls" in one.called:
            reads, writes = self._touched(one.called["calls"])
        elif one.opcode in ("dynamic-slice", "slice", "gather"):
            reads[0] = sum(array.bytes for array in one.arrays)
        elif one.opcode == "dynamic-update-slice":
            update = computation.instructions[one.operands[1]].arrays[0].bytes
            reads[0], writes = 0.0, update
        for number, operand in enumerate(one.operands):
            for array in computation.instructions[operand].arrays:
                size = min(array.bytes, reads.get(number, array.bytes))
                self._moved(array.memory, times * size)
        if writes is None:
            results = one.arrays
            if one.opcode.endswith("-start"):  # its type repeats the operands before the results
                results = _arrays(one.type)[len(_operand_arrays(computation, one)) :]
            for array in results:
                self._moved(array.memory, times * array.bytes)
        else:
            self._moved(one.arrays[0].memory if one.arrays else 0, times * writes)

    def _moved(self, memory: int, size: float) -> None:
        if memory == 0:
            self.totals.hbm_bytes += size
        elif memory == 5:
            self.totals.host_bytes += size

    @functools.cache  # noqa: B019 - the walk lives as long as its module
    def _touched(self, name: str) -> tuple[dict[int, float], float | None]:
        """Return what a fusion reads of a parameter where that is a slice only, and what it writes where that is one.

        None: it writes its whole result.
        """
        computation = self.computations[name]
        users: dict[str, list[Instruction]] = {}
        for one in computation.instructions.values():
            for operand in one.operands:
                users.setdefault(operand, []).append(one)
        reads: dict[int, float] = {}
        for number, parameter in computation.parameters.items():
            total = 0.0
            for user in _through_bitcasts(users, parameter.name):
                if user.opcode in ("dynamic-slice", "slice", "gather"):
                    total += sum(array.bytes for array in user.arrays)
                elif user.opcode == "fusion" and "calls" in user.called:
                    inner, _ = self._touched(user.called["calls"])
                    position = user.operands.index(parameter.name) if parameter.name in user.operands else -1
                    if position not in inner:
                        break
                    total += inner[position]
                elif user.opcode == "dynamic-update-slice" and _source(computation, user.operands[0]) == parameter.name:
                    continue  # updated in place
                else:
                    break
            else:
                reads[number] = total
        return reads, self._written(computation)

    def _written(self, computation: Computation) -> float | None:
        roots = [computation.root]
        if computation.root.opcode == "tuple":
            roots = [computation.instructions[name] for name in computation.root.operands]
        total, partial = 0.0, False
        for root in roots:
            while root.opcode == "bitcast":
                root = computation.instructions[root.operands[0]]
            if root.opcode == "dynamic-update-slice":
                total += computation.instructions[root.operands[1]].arrays[0].bytes
                partial = True
            else:
                total += sum(array.bytes for array in root.arrays if array.memory in (0, 5))
        return total if partial else None

    # --- Collectives ---

    def _collective_inside(self, one: Instruction) -> tuple[Computation, Instruction, str] | None:
        """Return the collective that the compiler has fused into `one`, None where there is none."""
        inner = self.computations[one.called["calls"]]
        for part in inner.instructions.values():
            kind = part.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                # An all-reduce of which every device keeps its own part.
                scatters = kind == "all-reduce" and re.search(r"(?i)reduce-?scatter", one.attributes)
                return inner, part, "reduce-scatter" if scatters else kind
            if part.opcode == "fusion" and (found := self._collective_inside(part)):
                return found
        return None

    def _collective(self, computation: Computation, one: Instruction, kind: str, times: float, mode: str) -> None:
        size = sum(array.bytes for array in _operand_arrays(computation, one))
        if kind == "collective-permute":
            pairs = [
                (int(source), int(target))
                for source, target in re.findall(r"\{(\d+),(\d+)\}", one.attributes.split("source_target_pairs=")[-1])
            ]
            groups = [[*pair] for pair in pairs]
            members = 2
        else:
            groups = self._groups_of(one.attributes)
            members = len(groups[0]) if groups else self.partitions
        if members < 2 or not size:
            return
        sent = _sent(kind, size, members)
        self.totals.collectives.append(Collective(kind, mode, sent, members, times, self._span(groups), False))

    def _send(self, computation: Computation, one: Instruction, times: float) -> None:
        """Count a transfer to another slice: libtpu sends these over the data center network, through the host."""
        size = computation.instructions[one.operands[0]].arrays[0].bytes if one.operands else 0.0
        named = re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)
        kind = named[1].lower().replace("_", "-") if named else "send"
        sent = _sent(kind, size, self.slices)
        self.totals.collectives.append(Collective(kind, "async", sent, self.slices, times, 0, True))
        self._moved(0, times * size)

    def _groups_of(self, attributes: str) -> list[list[int]]:
        """Return the first groups of a collective, as partition numbers; empty means one group of all."""
        found = re.search(
            r"replica_groups=(mesh\[[^\]]*\][^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?)*\})",
            attributes,
        )
        if not found:
            return []
        if found[1] not in self._groups:
            self._groups[found[1]] = _expand(found[1])
        return self._groups[found[1]]

    def _span(self, groups: list[list[int]]) -> int:
        """Return the physical axes that the groups span, a wrapped one counted twice."""
        if self.places is None:
            return 0
        spanned: set[int] = set()
        for group in groups or [list(range(len(self.places)))]:
            first = self.places[group[0]]
            for member in group[1:]:
                place = self.places[member]
                spanned |= {
                    axis
                    for axis, (here, there) in enumerate(zip(first.coordinates, place.coordinates, strict=True))
                    if here != there
                }
        wrapped = [axis < len(self.wrap) and self.wrap[axis] for axis in spanned]
        return len(spanned) + sum(wrapped)

    # --- Loops ---

    def _trips(self, scope: _Scope, one: Instruction) -> int | None:
        """Return how often a loop runs: what XLA says, else by running its counter. None when neither is known."""
        said = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', one.attributes)
        if said:
            return int(said[1])
        condition = _Scope(self.computations[one.called["condition"]], scope, one)
        body = _Scope(self.computations[one.called["body"]], scope, one)
        counters: dict[int, int] = {}
        for index in self._tested(condition.computation):
            value = self._element(scope, one.operands[0], index)
            if value is None:
                return None
            counters[index] = value
        trips = 0
        while trips < _COUNTER_LIMIT:
            condition.counters, body.counters = counters, counters
            goes_on = self._value(condition, condition.computation.root.name)
            if goes_on is None:
                return None
            if not goes_on:
                return trips
            root, following = body.computation.root, {}
            for index in counters:
                value = self._element(body, root.name, index)
                if value is None:
                    return None
                following[index] = value
            if following == counters:
                return None
            counters = following
            trips += 1
        return None

    def _tested(self, condition: Computation) -> Iterator[int]:
        """Yield the elements of the loop's tuple that its condition reads."""
        for one in condition.instructions.values():
            if one.opcode == "get-tuple-element":
                yield _index(one)

    def _value(self, scope: _Scope, name: str) -> int | None:
        """Return the value of an integer scalar, None where it does not follow from constants."""
        one = scope.computation.instructions[name]
        match one.opcode:
            case "constant":
                text = one.operands[0].strip("{} ")
                named = {"true": 1, "false": 0}.get(text)
                return named if named is not None else int(text) if re.fullmatch(r"-?\d+", text) else None
            case "bitcast" | "copy" | "convert" | "reshape" | "broadcast" | "copy-start" | "copy-done":
                return self._value(scope, one.operands[0])
            case "get-tuple-element":
                return self._element(scope, one.operands[0], _index(one))
            case "parameter":
                number = int(one.operands[0])
                caller = scope.caller
                if scope.parent is None or caller is None or caller.opcode == "while" or number >= len(caller.operands):
                    return None
                return self._value(scope.parent, caller.operands[number])
            case "fusion" | "call":
                name = one.called.get("calls") or one.called["to_apply"]
                inner = _Scope(self.computations[name], scope, one)
                return self._value(inner, inner.computation.root.name)
        left_and_right = [self._value(scope, operand) for operand in one.operands]
        if len(left_and_right) != 2 or None in left_and_right:
            return None
        left, right = left_and_right
        if one.opcode == "compare":
            direction = re.search(r"direction=(\w\w)", one.attributes)
            return int(_COMPARE[direction[1]](left, right)) if direction else None  # type: ignore[arg-type]
        operation = _ARITHMETIC.get(one.opcode)
        return operation(left, right) if operation else None  # type: ignore[arg-type]

    def _element(self, scope: _Scope, name: str, index: int) -> int | None:
        """Return the value of element `index` of a tuple, None where it does not follow from constants."""
        one = scope.computation.instructions[name]
        match one.opcode:
            case "tuple":
                return self._value(scope, one.operands[index])
            case "parameter":
                if index in scope.counters:
                    return scope.counters[index]
                if scope.parent is None or scope.caller is None:
                    return None
                if scope.caller.opcode == "while" and not self._invariant(scope.caller, index):
                    return None
                number = int(one.operands[0])
                if number >= len(scope.caller.operands):
                    return None
                return self._element(scope.parent, scope.caller.operands[number], index)
            case "while":
                return self._element(scope, one.operands[0], index) if self._invariant(one, index) else None
            case "fusion":
                inner = _Scope(self.computations[one.called["calls"]], scope, one)
                return self._element(inner, inner.computation.root.name, index)
        return None

    def _invariant(self, loop: Instruction, index: int) -> bool:
        """Whether a loop hands on element `index` of its tuple unchanged."""
        body = self.computations[loop.called["body"]]
        if body.root.opcode != "tuple":
            return False
        one = body.instructions[body.root.operands[index]]
        while one.opcode in ("copy", "bitcast"):
            one = body.instructions[one.operands[0]]
        return (
            one.opcode == "get-tuple-element"
            and body.instructions[one.operands[0]].opcode == "parameter"
            and _index(one) == index
        )


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda left, right: left < right,
    "LE": lambda left, right: left <= right,
    "GT": lambda left, right: left > right,
    "GE": lambda left, right: left >= right,
    "EQ": lambda left, right: left == right,
    "NE": lambda left, right: left != right,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda left, right: left + right,
    "subtract": lambda left, right: left - right,
    "multiply": lambda left, right: left * right,
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "maximum": max,
    "minimum": min,
}


def _sent(kind: str, size: float, members: int) -> float:
    """Return the bytes that one of `members` sends in a collective whose operand has `size` bytes."""
    share = (members - 1) / members
    factors = {
        "all-gather": members - 1,
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-to-all": share,
        "ragged-all-to-all": share,
    }
    return size * factors.get(kind, 1)


def _index(one: Instruction) -> int:
    """Return which element a get-tuple-element takes."""
    found = re.search(r"index=(\d+)", one.attributes)
    assert found is not None, one
    return int(found[1])


def _operand_arrays(computation: Computation, one: Instruction) -> list[Array]:
    return [array for operand in one.operands for array in computation.instructions[operand].arrays]


def _source(computation: Computation, name: str) -> str:
    """Return where a value comes from, through what only renames it."""
    one = computation.instructions[name]
    while one.opcode in ("bitcast", "copy") or (one.opcode == "fusion" and len(one.operands) == 1):
        one = computation.instructions[one.operands[0]]
    return one.name


def _through_bitcasts(users: dict[str, list[Instruction]], name: str) -> Iterator[Instruction]:
    for user in users.get(name, []):
        if user.opcode == "bitcast":
            yield from _through_bitcasts(users, user.name)
        else:
            yield user


def _expand(text: str) -> list[list[int]]:
    """Return the groups of a replica_groups attribute in any of its three forms."""
    if text.startswith("{"):
        return [[int(member) for member in group.split(",") if member] for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):
        shape, source, transposed = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()  # type: ignore[union-attr]
        sizes = [int(size) for size in source.split(",")]
        order = [int(axis) for axis in transposed.split(",")] if transposed else list(range(len(sizes)))
        flat = _transposed(sizes, order)
        width = int(shape.split(",")[-1])
        return [flat[start : start + width] for start in range(0, len(flat), width)]
    # A mesh of named axes, and the axes that a group runs over; an axis may be a part (before)size of a named one.
    axes = {name: int(size) for name, size in re.findall(r"'([\w.]+)'=(\d+)", text)}
    sizes, names = [], []
    over = re.findall(r"'([\w.]+)'(?::\((\d+)\)(\d+))?", text[text.index("{") :])
    parts = {name: (int(before), int(size)) for name, before, size in over if size}
    for name, size in axes.items():
        if name in parts:
            before, part = parts[name]
            sizes += [before, part, size // before // part]
            names += [f"{name} before", name, f"{name} after"]
        else:
            sizes.append(size)
            names.append(name)
    taken = [names.index(name) for name, _, _ in over]
    kept = [axis for axis in range(len(sizes)) if axis not in taken]
    flat = _transposed(sizes, kept + taken)
    width = math.prod(sizes[axis] for axis in taken)
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def _transposed(sizes: list[int], order: list[int]) -> list[int]:
    """Return 0..n-1, laid out in `sizes` and read in the order of axes `order`."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    flat = [0]
    for axis in order:
        flat = [base + step * strides[axis] for base in flat for step in range(sizes[axis])]
    return flat


def _matmul_flops(computation: Computation, one: Instruction) -> float:
    """Return the FLOPs of one `dot` or `convolution`, a multiply-add counted as two, padding not counted."""
    left, right = (computation.instructions[name].arrays[0].dimensions for name in one.operands[:2])
    out = one.arrays[0].dimensions
    if one.opcode == "dot":
        contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        depth = math.prod(left[int(axis)] for axis in contracting[1].split(",") if axis) if contracting else 1
        return 2.0 * math.prod(out) * depth
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    assert labels is not None, one
    left_labels, right_labels, out_labels = labels.groups()
    fields = _window(one.attributes)
    flops = 2.0 * right[right_labels.index("i")]
    for axis, label in enumerate(out_labels):
        if label in "bf":
            flops *= out[axis]
            continue
        number = int(label)
        flops *= _valid_pairs(
            left[left_labels.index(label)],
            out[axis],
            fields["size"][number] if "size" in fields else right[right_labels.index(label)],
            fields["stride"][number] if "stride" in fields else 1,
            fields["pad"][number] if "pad" in fields else 0,
            fields["lhs_dilate"][number] if "lhs_dilate" in fields else 1,
            fields["rhs_dilate"][number] if "rhs_dilate" in fields else 1,
        )
    groups = re.search(r"batch_group_count=(\d+)", one.attributes)
    return flops / int(groups[1]) if groups else flops


def _window(attributes: str) -> dict[str, list[int]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    return {
        key: [int(part.split("_")[0]) for part in value.split("x")]
        for key, value in fields.items()
        if key in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")
    }


@functools.lru_cache(maxsize=4096)
def _valid_pairs(size: int, outputs: int, window: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Return how many (output, window) positions of one spatial dimension meet a real input element."""
    reach = (size - 1) * lhs_dilate + 1
    count = 0
    for offset in range(window):
        shift = offset * rhs_dilate - pad
        # Outputs o with 0 <= o * stride + shift < reach that hit a multiple of lhs_dilate.
        first = max(0, math.ceil(-shift / stride))
        last = min(outputs - 1, (reach - 1 - shift) // stride)
        if last < first:
            continue
        if lhs_dilate == 1:
            count += last - first + 1
        else:
            count += sum((output * stride + shift) % lhs_dilate == 0 for output in range(first, last + 1))
    return count
