"""The one answer to “what kind of kernel is this?”: versioned, by the rules in `classifier.toml`.

A row's kind decides first (copies and fills), then the collective it was recorded with, then its name. A user's own
rules come before the packaged ones: a TOML file of the same form, given as an argument or in STEPSCOPE_CLASSIFIER.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.core.errors import BadInputError, first_line, unknown_name
from stepscope.formats import timeline

PLAIN, DEVICE_SYNC, STREAM_SYNC, EVENT_SYNC, EVENT_RECORD, STREAM_WAIT, BLOCKING_COPY, ALLOCATION = range(8)
"""What a call does: nothing that others wait for; wait for a device, a stream, an event; mark or await a place in a
stream; copy and return when the copy has ended; take or give back memory, which may wait for everything."""

_HOST = tomllib.loads(resources.files(__package__).joinpath("host_names.toml").read_text(encoding="utf-8"))
_CALLS = (
    "plain", "device_sync", "stream_sync", "event_sync", "event_record", "stream_wait", "blocking_copy", "allocation",
)  # fmt: skip
_WITHOUT_WORK = frozenset(_HOST["without_work"])
_RULES = [(_CALLS.index(role), re.compile(pattern, re.IGNORECASE)) for role, pattern in _HOST["calls"].items()]


@lru_cache(8192)
def classify_call(name: str) -> int:
    for role, pattern in _RULES:
        if pattern.search(name):
            return role
    return PLAIN


_LAUNCH = re.compile(r"Launch|EnqueueKernel|(cu|hip)\w*Graph\w*Launch", re.IGNORECASE)


def is_launch_name(name: str) -> bool:
    """Whether a runtime call hands work to a device (cudaLaunchKernel, hipExtModuleLaunchKernel, cudaGraphLaunch)."""
    return _LAUNCH.search(name) is not None


HOST_WAITS = frozenset({DEVICE_SYNC, STREAM_SYNC, EVENT_SYNC, BLOCKING_COPY})
"""Roles of calls that return only when device work has ended."""


def does_no_work(name: str) -> bool:
    """Whether an operator (`aten::as_strided`, with or without its overload) only makes a view or allocates."""
    return name.partition("::")[2].partition(".")[0] in _WITHOUT_WORK


_CACHE_SIZE = 1 << 16
_LONGEST = 4096
"""Characters looked at: names come from files of unknown origin, and no real one says anything new behind this many."""

_ANONYMOUS = "(anonymous namespace)"
_UNNAMED = re.compile(r"<unnamed>(?=::)|\{anonymous\}|`anonymous namespace'|\(anonymous\)(?=::)")
_BOOL_CAST = re.compile(r"\(bool\)([01])\b")
_NUMBER_CAST = re.compile(r"\((?:[A-Za-z_][\w:]*(?: [a-z]+)*)\)(-?\d)")
_NUMBER_SUFFIX = re.compile(r"\b(\d+)(?:u|l|ul|ull|ll)\b", re.IGNORECASE)
_CONST_BEFORE = re.compile(r"\bconst ([\w:]+)(?=[ *&,>)])")
_NSYS_LAMBDA = re.compile(r"\[lambda(\([^()\[\]]*\)) \(instance (\d+)\)\]")
_ENABLE_IF = re.compile(r"^(?:\w+ )*(?:\w+::)*enable_if(?:_t)?<.*?>(?:::type)? (?=[\w(:])")
"""A return type that Nsight Systems writes with unequal brackets (`enable_if<T2>(int)0&&…>::type f<…>`)."""
_SPACES = re.compile(r" *([<>,*&]) *")
_MANGLED_LENGTH = re.compile(r"[1-9]\d{0,3}")
_MANGLED_NOISE = re.compile(r"S[0-9A-Z]*_|T\d*_|L[a-z]n?\d+E|En?\d+E")
"""Substitutions, template parameters, literals: digits in them are no lengths."""

_NOT_CODE = re.compile(r"\[?(?:CUDA )?mem(?:cpy|set)\b", re.IGNORECASE)
"""`Memcpy HtoD (Pageable -> Device)`, `[CUDA memset]`: words of a profiler, no signature."""

_CLOSE = ">)}]"
_HIDDEN_NAMESPACES = re.compile(r"^(?:at::native::|at::|c10::|std::)+|\(anonymous namespace\)::")

_WRAPPERS = re.compile(
    r"(?:^|::)(?:Kernel2?|device_kernel|\w*elementwise\w*_kernel\w*|reduce_kernel|multi_tensor_apply_kernel"
    r"|DeviceReduce\w*|DeviceScan\w*|DeviceSelect\w*|kernel_agent|static_kernel|elementwise_kernel_with_index"
    r"|distribution_elementwise_grid_stride_kernel)$"
)
_CUTLASS = re.compile(r"\bcutlass_(?:\d|tensorop|simt)\w*")
_CUTLASS_PARTS = ("ImplicitGemmConvolution", "ReduceSplitK", "GemmUniversal", "FlashAttn", "FmhaKernel")
_FUNCTOR = re.compile(
    r"(?<!\w)(?!gpu_kernel|operator|ReduceOp\b|OffsetCalculator)"
    r"(?:\w{1,80}?[Ff]unctor\w*|\w{2,80}?Ops?\b|\w{3,80}(?=\([^()]*\)(?: const)?::\{lambda))"
)


@lru_cache(_CACHE_SIZE)
def normal_name(name: str) -> str:
    """Qualified name with template arguments, in one spelling; without return type and parameter list.

    Parameters are dropped because Nsight Systems writes them as `T1 *`, Kineto as the types themselves.
    """
    text = name[:_LONGEST].strip()
    if _NOT_CODE.match(text):
        return text
    if text.startswith("_Z"):
        text = _readable(text)
    text = _NSYS_LAMBDA.sub(r"{lambda\1#\2}", _UNNAMED.sub(_ANONYMOUS, text)).replace("operator ()", "operator()")
    text = _ENABLE_IF.sub("", text.removesuffix(" [clone .kd]").removesuffix(".kd"), count=1)
    text = _without_return_type(_without_parameters(text))
    if "<" in text:
        text = _BOOL_CAST.sub(lambda found: "true" if found[1] == "1" else "false", text)
        text = _NUMBER_CAST.sub(r"\1", text)
        text = _NUMBER_SUFFIX.sub(r"\1", text)
        text = _CONST_BEFORE.sub(r"\1 const", text)
        text = _SPACES.sub(r"\1", text).replace(",", ", ")
    return text.strip()


@lru_cache(_CACHE_SIZE)
def base_name(name: str) -> str:
    """Namespaces and identifier alone: `at::native::reduce_kernel`."""
    whole = normal_name(name)
    return whole if _NOT_CODE.match(whole) else _outside_brackets(whole)


@lru_cache(_CACHE_SIZE)
def short_name(name: str) -> str:
    """For a table: the identifier, and for kernels that only wrap something the thing they wrap."""
    base = base_name(name)
    shown = _HIDDEN_NAMESPACES.sub("", base) or base
    if not is_wrapper(name):
        return shown
    arguments = normal_name(name)[len(base) :]
    if found := _CUTLASS.search(arguments):
        return found[0]
    if "cutlass" in base:
        part = next((part for part in _CUTLASS_PARTS if part in arguments), None)
        return f"{shown}<{part}>" if part else shown
    functors = _FUNCTOR.findall(arguments)
    return f"{shown}<{functors[-1]}>" if functors else shown


@lru_cache(_CACHE_SIZE)
def is_wrapper(name: str) -> bool:
    """Whether the identifier says nothing of the work and the template arguments must be asked."""
    return bool(_WRAPPERS.search(base_name(name)))


def _outside(text: str, brackets: str = "<({[") -> Iterator[tuple[int, str]]:
    """Place and letter of all that stands outside brackets, the opening ones included; an anonymous namespace is one
    letter."""
    closing = _CLOSE[: len(brackets)]
    depth = place = 0
    while place < len(text):
        letter = text[place]
        if letter == "(" and not depth and text.startswith(_ANONYMOUS, place):
            letter = _ANONYMOUS
        if letter in closing:
            depth = max(0, depth - (text[place - 1 : place] != "-"))
        else:
            if not depth:
                yield place, letter
            depth += letter in brackets
        place += len(letter)


def _without_parameters(text: str) -> str:
    """Cuts the parameter list: the first top-level parenthesis after which nothing is qualified further."""
    start = next((place for place, letter in _outside(text) if letter == "("), -1)
    return text[:start].strip() if start > 0 else text


def _without_return_type(text: str) -> str:
    """Cuts what stands before the last top-level space: `void`, `std::enable_if<…>::type`, `static`."""
    return text[max((place + 1 for place, letter in _outside(text) if letter == " "), default=0) :] or text


def _outside_brackets(text: str) -> str:
    return "".join(letter for _, letter in _outside(text, "<({") if letter not in "<({").strip() or text


def _readable(mangled: str) -> str:
    """The identifiers of a mangled name as `a::b<c, d, …>`.

    Not a demangler: substitutions and literals are left out. Enough to say what a kernel is, because its identifiers
    stand in the name in clear text with their lengths before them.
    """
    qualified: list[str] = []
    arguments: list[str] = []
    nested = mangled.startswith("_ZN")
    words = qualified
    place = 2
    while place < len(mangled):
        if found := _MANGLED_NOISE.match(mangled, place):
            place = found.end()
        elif found := _MANGLED_LENGTH.match(mangled, place):
            place = found.end() + int(found[0])
            word = mangled[found.end() : place]
            words.append(_ANONYMOUS if word.startswith("_GLOBAL__N") else word)
            words = words if nested else arguments
        else:
            if qualified and mangled[place] in "IE":
                words = arguments
            place += 1
    name = "::".join(qualified) or mangled
    return f"{name}<{', '.join(arguments)}>" if arguments else name


CATEGORIES = (
    "communication", "copy", "set", "moe", "attention", "convolution", "gemm", "embedding", "norm", "softmax",
    "optimizer", "sort", "reduction", "elementwise", "other",
)  # fmt: skip
COMMUNICATION, COPY, SET, MOE, ATTENTION, CONVOLUTION, GEMM, EMBEDDING = range(8)
NORM, SOFTMAX, OPTIMIZER, SORT, REDUCTION, ELEMENTWISE, OTHER = range(8, 15)

CLASSIFIER_VERSION = 2
"""Raised whenever a rule changes what a kernel is: results of different versions are not comparable class by class."""

CLASSIFIER_VARIABLE = "STEPSCOPE_CLASSIFIER"
_RULE_KEYS = frozenset({"category", "pattern", "whole", "also", "reason"})
_NUMBERED = re.compile(r"%?[a-z][a-z0-9_-]*(?:\.\d+)+")


class Rule(NamedTuple):
    """One line of the table; exactly one of the two patterns is there."""

    category: int
    pattern: re.Pattern[str] | None
    """Searched in the identifier with its namespaces."""
    whole: re.Pattern[str] | None
    """Searched in the name with its template arguments."""
    also: tuple[str, ...]
    reason: str


class Classifier:
    """Rules in order; the first that fits decides. Use `find_classifier` to get one."""

    def __init__(self, rules: Sequence[Rule], identity: str) -> None:
        self.rules = tuple(rules)
        self.identity = identity
        """Names the rules: goes with every result, and into the key of every cache of results."""
        self._rule_of = lru_cache(_CACHE_SIZE)(self._find_rule)

    def classify(self, name: str, *, kind: int, collective: str | None = None) -> int:
        """Index into CATEGORIES; −1 (MISSING) for rows that keep no device busy, annotations of kernels among them."""
        if kind not in timeline.DEVICE_KINDS:
            return timeline.MISSING
        if kind != timeline.KERNEL:
            return COPY if kind == timeline.COPY else SET
        if collective:
            return COMMUNICATION
        return self._classify_kernel(name)

    def classify_names(self, names: Sequence[str]) -> list[int]:
        """The same for kernels by name alone, one answer a name."""
        return [self._classify_kernel(name) for name in names]

    def labels(self, name: str) -> tuple[str, ...]:
        """The kernel's class and what else it is: a fused kernel carries two, some a finer word (`kv_cache_write`)."""
        rule = self._rule_of(name)
        return ("other",) if rule is None else (CATEGORIES[rule.category], *rule.also)

    def explain(self, name: str) -> str:
        """Why the kernel is what it is."""
        rule = self._rule_of(name)
        return "no rule fits" if rule is None else rule.reason

    def _classify_kernel(self, name: str) -> int:
        # A compiler numbers its operations (fusion.1 … fusion.40000): one look at the word is enough.
        rule = self._rule_of(name[: name.index(".")] if _NUMBERED.fullmatch(name) else name)
        return OTHER if rule is None else rule.category

    def _find_rule(self, name: str) -> Rule | None:
        base, whole = base_name(name), normal_name(name)
        for rule in self.rules:
            if (rule.pattern and rule.pattern.search(base)) or (rule.whole and rule.whole.search(whole)):
                return rule
        return None


def classify(name: str, *, kind: int, collective: str | None = None) -> int:
    """What a row of a timeline is: index into CATEGORIES, −1 for rows that keep no device busy."""
    return find_classifier().classify(name, kind=kind, collective=collective)


def classify_names(names: Sequence[str]) -> list[int]:
    """What kernels with these names are; call it once per distinct name."""
    return find_classifier().classify_names(names)


def labels(name: str) -> tuple[str, ...]:
    """Class of a kernel by name, then its further labels."""
    return find_classifier().labels(name)


def find_classifier(path: Path | None = None) -> Classifier:
    """The packaged rules, after those of `path` or of the file in STEPSCOPE_CLASSIFIER; read once a process."""
    chosen = path or (Path(os.environ[CLASSIFIER_VARIABLE]) if os.environ.get(CLASSIFIER_VARIABLE) else None)
    if chosen is None:
        return _packaged_classifier()
    try:
        text = chosen.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"cannot read the classifier rules: {first_line(error)}",
            hint=f"unset {CLASSIFIER_VARIABLE} to use the packaged rules alone",
            where=str(chosen),
        ) from error
    return _extended_classifier(text, str(chosen))


@cache
def _packaged_classifier() -> Classifier:
    text = resources.files(__package__).joinpath("classifier.toml").read_text(encoding="utf-8")
    return Classifier(parse_rules(text, where="classifier.toml"), str(CLASSIFIER_VERSION))


@lru_cache(8)
def _extended_classifier(text: str, where: str) -> Classifier:
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Classifier([*parse_rules(text, where=where), *_packaged_classifier().rules], f"{CLASSIFIER_VERSION}+{own}")


def parse_rules(text: str, *, where: str) -> list[Rule]:
    """Rules of a TOML text; anything that is not a rule is refused with its number."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"not TOML: {first_line(error)}", where=where) from error
    entries = content.get("rule")
    if not isinstance(entries, list) or set(content) != {"rule"}:
        hint = "write [[rule]] tables with category, pattern and reason"
        raise BadInputError("a classifier file holds [[rule]] tables and nothing else", hint=hint, where=where)
    return [_parse_rule(entry, f"{where}: rule {number}") for number, entry in enumerate(entries, start=1)]


def _parse_rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict):
        raise BadInputError("a rule is a table", where=where)
    for key in entry:
        if key not in _RULE_KEYS:
            raise unknown_name("key of a rule", key, sorted(_RULE_KEYS), where=where)
    category = entry.get("category")
    if category not in CATEGORIES:
        raise unknown_name("category", str(category), CATEGORIES, where=where)
    if ("pattern" in entry) == ("whole" in entry):
        raise BadInputError("a rule has either `pattern` or `whole`", where=where)
    also = entry.get("also", [])
    if not isinstance(also, list) or not all(isinstance(label, str) for label in also):
        raise BadInputError("`also` is a list of words", where=where)
    return Rule(
        category=CATEGORIES.index(category),
        pattern=_compile(entry.get("pattern"), where),
        whole=_compile(entry.get("whole"), where),
        also=tuple(also),
        reason=str(entry.get("reason", "")),
    )


def _compile(pattern: object, where: str) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(str(pattern), re.IGNORECASE)
    except re.error as error:
        raise BadInputError(f"{pattern!r} is not a regular expression: {error}", where=where) from error


_DEVICE_WAIT = re.compile(r"(?:event|semaphore|fence)_(?:wait|record|signal)|(?:wait|record)_event", re.IGNORECASE)


def is_device_wait(name: str) -> bool:
    """Whether a row that a device recorded among its work is a wait, or marks a place in a queue: no work.

    MTIA writes such rows (`event_wait`) beside its kernels.
    """
    return _DEVICE_WAIT.fullmatch(name) is not None


_HOST_WORK = re.compile(r"^(?:gloo|mpi|ucc):(\w+)$")
_DEVICE_WORK = re.compile(r"^(?:nccl|rccl|xccl):(\w+)(?: .*)?$")
_HOST_CALL = re.compile(r"^c10d::_?(\w+?)_?$")


def classify_host_communication(name: str) -> str | None:
    """The collective that a host row stands for: the work (`gloo:all_reduce`) or the call (`c10d::allreduce_`).

    None for anything else, `nccl:all_reduce` among it: that annotation repeats a kernel. Work on the CPU runs on
    another thread than the call, and the device view of such a trace shows no communication at all.
    """
    found = _HOST_WORK.match(name) or _HOST_CALL.match(name)
    if found is None:
        return None
    word = found[1]
    return str(_HOST["collectives"].get(word, word))


def is_host_work(name: str) -> bool:
    """Whether a row is the work of a collective on the host (`gloo:all_reduce`), however the profiler files it."""
    return _HOST_WORK.match(name) is not None


def classify_lone_communication(name: str) -> str | None:
    """The same for a trace without a device, such as a flight-recorder dump: there no kernel says it again."""
    found = _DEVICE_WORK.match(name)
    return found[1] if found else classify_host_communication(name)
